"""Reach a run's files on a disk.

Keys are paths relative to the run's folder, separated by `/`. Every change on the disk goes through
a method of `Files`, so that a test can kill a process at any of them.

Proof: `python -m pytest tests/runs/test_store.py`.
"""

import contextlib
import io
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from .ranks import DamagedCheckpoint, HostileCheckpoint

StrPath = str | os.PathLike[str]
# The most bytes of a file that is read at once, if no other limit is given. A checkpoint of 10,000
# ranks has a manifest of 1 MB.
MOST_SMALL_BYTES = 2**24
logger = logging.getLogger(__name__)


def checked(key: str) -> str:
    """Return the key if it stays inside of the folder, or raise HostileCheckpoint."""
    has_dots = any(name in ("", ".", "..") for name in key.split("/"))
    if has_dots or "\\" in key or "\0" in key:
        raise HostileCheckpoint(
            f"{key!r} leads out of the run's folder: don't load this checkpoint"
        )
    return key


class HashingStream(io.BufferedWriter):
    """A new file that hashes what is written to it, from its beginning to its end."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self.hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.hash.update(data)
        return written

    def close(self) -> None:
        """Do nothing: torch closes it before it is on the disk."""


class Files:
    """The files of a run: a folder on a local or mounted file system."""

    def __init__(self, root: StrPath) -> None:
        self.root = Path(root).absolute()

    def path(self, key: str) -> Path:
        return self.root / checked(key) if key else self.root

    def make_folder(self, key: str) -> None:
        self.path(key).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def create(self, key: str) -> Iterator["HashingStream"]:
        """Open a new file; its content is on the disk when the `with` statement ends."""
        with io.FileIO(self.path(key), "x") as file:
            stream = HashingStream(file)
            yield stream
            stream.flush()
            os.fsync(file.fileno())

    def read(self, key: str, *, most_bytes: int = MOST_SMALL_BYTES) -> bytes:
        """Return the content of a file; raise DamagedCheckpoint if it is longer than allowed."""
        with self.open(key) as stream:
            data = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise DamagedCheckpoint(
                f"{self.path(key)} is larger than {most_bytes:,} bytes, the most that is read"
            )
        return data

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Write a small file, or replace one; it is on the disk when this returns."""
        folder, _, name = key.rpartition("/")
        new = f"{folder}/.{name}.new".lstrip("/")
        # A process that was killed while writing leaves this file behind.
        self.path(new).unlink(missing_ok=True)
        with self.create(new) as stream:
            stream.write(data)
        self.path(new).replace(self.path(key))
        self.sync_folder(folder)

    def sync_folder(self, key: str) -> None:
        descriptor = os.open(self.path(key), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        self.path(old).rename(self.path(new))

    def remove_folder(self, key: str) -> None:
        """Remove a folder if it is there."""
        path = self.path(key)
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)

    def names(self, key: str) -> list[str]:
        path = self.path(key)
        return sorted(one.name for one in path.iterdir()) if path.is_dir() else []

    def sizes(self, key: str) -> dict[str, int | None]:
        """Return the size of each file below a folder, relative to it; None of others."""
        path = self.path(key)
        found: dict[str, int | None] = {}
        for one in path.rglob("*"):
            # Another process may remove the folder just now.
            with contextlib.suppress(FileNotFoundError):
                status = one.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    is_file = stat.S_ISREG(status.st_mode)
                    found[one.relative_to(path).as_posix()] = status.st_size if is_file else None
        return found

    def kind(self, key: str) -> str | None:
        """Return "file", "folder" or "link or device", or None if nothing exists."""
        try:
            mode = self.path(key).lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISREG(mode):
            return "file"
        return "folder" if stat.S_ISDIR(mode) else "link or device"

    def open(self, key: str) -> io.BufferedReader:
        return self.path(key).open("rb")

    def point(self, key: str, target: str | None) -> None:
        """Make a name point to a folder, or to nothing."""
        path = self.path(key)
        if target == (str(path.readlink()) if path.is_symlink() else None):
            return
        new = self.path(f".{key}.new")
        try:
            new.unlink(missing_ok=True)
            if target is None:
                path.unlink()
            else:
                new.symlink_to(checked(target), target_is_directory=True)
                new.replace(path)
        except OSError as error:
            # A file system without links, or a folder in its place: a copy that follows links.
            logger.warning("%s does not point to %s (%s): nothing needs it", path, target, error)
        self.sync_folder("")

    def free_bytes(self, key: str) -> int:
        """Return the free bytes on a folder's volume; it may be a link, or not be there yet."""
        path = self.path(key).resolve()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free
