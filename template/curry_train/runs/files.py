"""Where a run's files are: what a store needs of any place, and a local folder, with rename, fsync and links.

Keys are paths relative to the run's folder, with `/`. Every change of the disk goes through a method of this class,
so that a test can let a process die at any of them. Proof: `python -m pytest tests/test_store_kill.py`.
"""

import contextlib
import os
import shutil
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO

from .errors import HostileCheckpoint


class Files(ABC):
    """`renames`: whether a whole folder can be renamed at once; without it, a manifest written last commits."""

    renames: bool

    @abstractmethod
    def location(self, key: str) -> str:
        """What other programs open."""

    @abstractmethod
    def make_folder(self, key: str) -> None: ...

    @abstractmethod
    def create(self, key: str) -> BinaryIO:
        """A new file; an existing one is an error."""

    @abstractmethod
    def finish(self, stream: BinaryIO) -> None:
        """Close what was written, on the disk when this returns."""

    @abstractmethod
    def sync_folder(self, key: str) -> None:
        """Names in a folder are on the disk when this returns."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None: ...

    @abstractmethod
    def remove_folder(self, key: str) -> None:
        """A folder and what it holds; a link in its place is removed itself."""

    @abstractmethod
    def remove_file(self, key: str) -> None: ...

    @abstractmethod
    def names(self, key: str) -> list[str]:
        """What a folder holds; nothing where there is none."""

    @abstractmethod
    def kind(self, key: str) -> str | None:
        """file, folder or other (a link, a device); None where nothing is there."""

    @abstractmethod
    def size(self, key: str) -> int: ...

    @abstractmethod
    def open(self, key: str) -> BinaryIO: ...

    @abstractmethod
    def point(self, key: str, target: str) -> None:
        """Let a name stand for a folder, at once."""

    @abstractmethod
    def pointed(self, key: str) -> str | None:
        """Where a name points."""

    def free_bytes(self) -> int | None:
        """Room that is left, where that can be asked."""
        return None

    def read(self, key: str) -> bytes:
        with self.open(key) as stream:
            return stream.read()

    def write(self, key: str, data: bytes) -> None:
        """A small new file, on the disk when this returns."""
        stream = self.create(key)
        try:
            stream.write(data)
            self.finish(stream)
        except BaseException:
            self.abandon(stream)
            raise

    def abandon(self, stream: BinaryIO) -> None:
        """Let go of a file that was not written to its end; the error that led here is the one to hear of."""
        with contextlib.suppress(OSError):
            stream.close()


def checked(key: str) -> str:
    """A key that stays inside of the folder."""
    if (
        key.startswith("/")
        or "\\" in key
        or "\0" in key
        or any(part in ("", ".", "..") for part in key.split("/"))
    ):
        raise HostileCheckpoint(
            f"{key!r} leads out of the run's folder: don't load this checkpoint"
        )
    return key


class LocalFiles(Files):
    """A folder of this machine, or one that is mounted."""

    def __init__(self, root: str | os.PathLike[str], *, renames: bool = True) -> None:
        self.root = Path(root).absolute()
        self.renames = renames

    def path(self, key: str) -> Path:
        return self.root / checked(key) if key else self.root

    def location(self, key: str) -> str:
        return str(self.path(key))

    def make_folder(self, key: str) -> None:
        self.path(key).mkdir(parents=True, exist_ok=True)

    def create(self, key: str) -> BinaryIO:
        return self.path(key).open("xb")

    def finish(self, stream: BinaryIO) -> None:
        try:
            stream.flush()
            os.fsync(stream.fileno())
        finally:
            stream.close()

    def write(self, key: str, data: bytes) -> None:
        folder, _, name = key.rpartition("/")
        new = f"{folder}/.{name}.new".lstrip("/")
        self.path(new).unlink(missing_ok=True)  # of a process that was killed while it wrote
        super().write(new, data)
        self.path(new).replace(self.path(key))

    def sync_folder(self, key: str) -> None:
        descriptor = os.open(self.path(key), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        self.path(old).rename(self.path(new))

    def remove_folder(self, key: str) -> None:
        path = self.path(key)
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)

    def remove_file(self, key: str) -> None:
        self.path(key).unlink()

    def names(self, key: str) -> list[str]:
        path = self.path(key)
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def kind(self, key: str) -> str | None:
        try:
            mode = self.path(key).lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"

    def size(self, key: str) -> int:
        return self.path(key).lstat().st_size

    def open(self, key: str) -> BinaryIO:
        def without_following(path: str, flags: int) -> int:
            return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))

        return open(self.path(key), "rb", opener=without_following)  # Path.open takes no opener

    def point(self, key: str, target: str) -> None:
        new = self.path(f".{key}.new")
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(checked(target), target_is_directory=True)
        except (OSError, NotImplementedError):  # links are not everywhere, or not for everyone
            new.write_text(target + "\n", encoding="utf-8")
        new.replace(self.path(key))
        self.sync_folder("")

    def pointed(self, key: str) -> str | None:
        path = self.path(key)
        if path.is_symlink():
            return str(path.readlink())
        return path.read_text(encoding="utf-8").strip() if path.is_file() else None

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.root).free
