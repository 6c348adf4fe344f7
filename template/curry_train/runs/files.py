"""Change a run's files on a disk, so that a crash leaves the old or the new ones.

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

from .ranks import DamagedCheckpoint

StrPath = str | os.PathLike[str]
# The most bytes of a file that is read at once, if no other limit is given. A checkpoint of 10,000
# ranks has a manifest of 1 MB.
MOST_SMALL_BYTES = 2**24
logger = logging.getLogger(__name__)


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


@contextlib.contextmanager
def create(path: Path) -> Iterator[HashingStream]:
    """Open a new file; its content is on the disk when the `with` statement ends."""
    with io.FileIO(path, "x") as file:
        stream = HashingStream(file)
        yield stream
        stream.flush()
        os.fsync(file.fileno())


def read(path: Path, *, most_bytes: int = MOST_SMALL_BYTES) -> bytes:
    """Return the content of a file; raise DamagedCheckpoint if it is longer than allowed."""
    with path.open("rb") as stream:
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise DamagedCheckpoint(
            f"{path} is larger than {most_bytes:,} bytes, the most that is read"
        )
    return data


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a small file, or replace one; it is on the disk when this returns."""
    new = path.with_name(f".{path.name}.new")
    # A process that was killed while writing leaves this file behind.
    new.unlink(missing_ok=True)
    with create(new) as stream:
        stream.write(data)
    new.replace(path)
    sync_folder(path.parent)


@contextlib.contextmanager
def making(run: Path) -> Iterator[None]:
    """Refuse the folder of a run in which nothing can be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"runs={run}: no run can be written there ({error.strerror}): give another folder"
        ) from error


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Remove a folder, or what is in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sizes(path: Path) -> dict[str, int | None]:
    """Return the size of each file below a folder, relative to it; None of others."""
    found: dict[str, int | None] = {}
    for one in path.rglob("*"):
        # Another process may remove the folder just now.
        with contextlib.suppress(FileNotFoundError):
            status = one.lstat()
            if not stat.S_ISDIR(status.st_mode):
                is_file = stat.S_ISREG(status.st_mode)
                found[one.relative_to(path).as_posix()] = status.st_size if is_file else None
    return found


def point(path: Path, target: str | None) -> None:
    """Make a path point to a folder beside it, or to nothing."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        if target is None:
            path.unlink(missing_ok=True)
        else:
            new.symlink_to(target, target_is_directory=True)
            new.replace(path)
    except OSError as error:
        # A file system without links, or a folder in its place: a copy that follows links.
        logger.warning("%s does not point to %s (%s): nothing needs it", path, target, error)
    sync_folder(path.parent)
