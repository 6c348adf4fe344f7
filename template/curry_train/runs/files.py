"""Reach a run's files on a disk.

Keys are paths relative to the run's folder, separated by `/`. Every change on the disk goes through
a method of `Files`, so that a test can kill a process at any of them.

Proof: `python -m pytest tests/runs/test_store.py`.
"""

import contextlib
import logging
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from .ranks import DamagedCheckpoint, HostileCheckpoint

MOST_POINTER_BYTES = 4096
StrPath = str | os.PathLike[str]
logger = logging.getLogger(__name__)


def checked(key: str) -> str:
    """Return the key if it stays inside of the folder, or raise HostileCheckpoint."""
    has_dots = any(name in ("", ".", "..") for name in key.split("/"))
    if has_dots or key.startswith("/") or "\\" in key or "\0" in key:
        raise HostileCheckpoint(
            f"{key!r} leads out of the run's folder: don't load this checkpoint"
        )
    return key


class Files:
    """The files of a run: a folder on a local or mounted file system."""

    def __init__(self, root: StrPath) -> None:
        self.root = Path(root).absolute()

    def path(self, key: str) -> Path:
        return self.root / checked(key) if key else self.root

    def location(self, key: str) -> str:
        """Return the path under which other programs open this key."""
        return str(self.path(key))

    def make_folder(self, key: str) -> None:
        self.path(key).mkdir(parents=True, exist_ok=True)

    def create(self, key: str) -> BinaryIO:
        return self.path(key).open("xb")

    def finish(self, stream: BinaryIO) -> None:
        """Close a written file; its content is on the disk when this returns."""
        try:
            stream.flush()
            os.fsync(stream.fileno())
        finally:
            stream.close()

    def abandon(self, stream: BinaryIO) -> None:
        """Close an incomplete file, ignoring errors so that the original error is raised."""
        with contextlib.suppress(OSError):
            stream.close()

    def read(self, key: str, *, most_bytes: int | None = None) -> bytes:
        """Return the content of a file; raise DamagedCheckpoint if it is longer than allowed."""
        with self.open(key) as stream:
            if most_bytes is None:
                return stream.read()
            data = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise DamagedCheckpoint(
                f"{self.location(key)} is larger than {most_bytes:,} bytes, the most that is read"
            )
        return data

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Write a small file, or replace one; it is on the disk when this returns."""
        folder, _, name = key.rpartition("/")
        new = f"{folder}/.{name}.new".lstrip("/")
        # A process that was killed while writing leaves this file behind.
        self.path(new).unlink(missing_ok=True)
        stream = self.create(new)
        try:
            stream.write(data)
            self.finish(stream)
        except BaseException:
            self.abandon(stream)
            raise
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
        if not path.is_dir():
            return []
        return sorted(entry.name for entry in path.iterdir())

    def kind(self, key: str) -> str | None:
        """Return "file", "folder" or "other" (a link, a device), or None if nothing exists."""
        try:
            mode = self.path(key).lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISREG(mode):
            return "file"
        return "folder" if stat.S_ISDIR(mode) else "other"

    def size(self, key: str) -> int:
        return self.path(key).lstat().st_size

    def open(self, key: str) -> BinaryIO:
        def without_following(path: str, flags: int) -> int:
            return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))

        # Path.open has no parameter `opener`.
        return open(self.path(key), "rb", opener=without_following)

    def point(self, key: str, target: str) -> None:
        """Atomically make a name point to a folder."""
        new = self.path(f".{key}.new")
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(checked(target), target_is_directory=True)
        except (OSError, NotImplementedError):
            # The file system has no symbolic links, or this user may not create them.
            new.write_text(target + "\n", encoding="utf-8")
        self._move_folder_aside(key)
        new.replace(self.path(key))
        self.sync_folder("")

    def _move_folder_aside(self, key: str) -> None:
        """Rename a folder in place of a link: a copy with `cp -rL`, which may be the only one."""
        path = self.path(key)
        if path.is_dir() and not path.is_symlink():
            aside = path.with_name(f"{key}-was-a-folder-{secrets.token_hex(4)}")
            path.rename(aside)
            logger.warning(
                "%s was a folder and is %s now: a copy of a run that follows links makes one; "
                "delete it if you need no second copy",
                path,
                aside.name,
            )

    def pointed(self, key: str) -> str | None:
        path = self.path(key)
        if path.is_symlink():
            return str(path.readlink())
        if not path.is_file():
            return None
        with self.open(key) as stream:
            return stream.read(MOST_POINTER_BYTES).decode("utf-8", errors="replace").strip()

    def free_bytes(self, key: str = "") -> int:
        """Return the free bytes on a folder's volume; it may be a link, or not be there yet."""
        path = self.path(key).resolve()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free
