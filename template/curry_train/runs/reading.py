"""A checkpoint that is being read is not removed: the reader holds the kernel's shared lock on its manifest.

The lock ends with the reader, however that ends, and writes nothing into the run. Where no kernel lock is (an object
store, Windows) nothing is held: a reader then finds the checkpoint damaged and takes another.
Proof: `python -m pytest tests/test_reading.py`.
"""

import contextlib
import os
from collections.abc import Iterator

from .files import Files, LocalFiles
from .forked import close_here, open_here
from .manifest import MANIFEST


@contextlib.contextmanager
def reading(files: Files, folder: str) -> Iterator[bool]:
    """While this is open, retention leaves a checkpoint. Yields whether it could be held."""
    descriptor = _locked(files, folder, alone=False)
    try:
        yield descriptor is not None
    finally:
        _unlock(descriptor)


def is_being_read(files: Files, folder: str) -> bool:
    """Whether a reader holds it, in any process that uses this file system."""
    if not isinstance(files, LocalFiles) or files.kind(f"{folder}/{MANIFEST}") != "file":
        return False
    try:
        descriptor = _locked(files, folder, alone=True)
    except BlockingIOError:
        return True
    _unlock(descriptor)
    return False


def _locked(files: Files, folder: str, *, alone: bool) -> int | None:
    """A descriptor of the manifest with the lock on it; None where there is nothing to lock."""
    try:
        import fcntl
    except ImportError:
        return None
    if (
        not isinstance(files, LocalFiles) or files.kind(folder) != "folder"
    ):  # a link leads out of the run
        return None
    try:
        descriptor = open_here(files.path(f"{folder}/{MANIFEST}"), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        close_here(descriptor)
        raise
    except OSError:  # a file system without locks
        close_here(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        close_here(descriptor)
