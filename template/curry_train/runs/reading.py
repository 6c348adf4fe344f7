"""Read locks, so that retention does not remove a checkpoint while it is being read.

A reader holds the kernel's shared lock on the checkpoint's manifest. The lock ends with the
reader, even if its process is killed, and writes nothing into the run. Without kernel locks (an
object store, Windows) nothing is locked: a reader then finds the checkpoint damaged and takes
another one.
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
    """Hold the read lock of a checkpoint; yields whether it could be locked."""
    descriptor = _locked(files, folder, alone=False)
    try:
        yield descriptor is not None
    finally:
        _unlock(descriptor)


def is_being_read(files: Files, folder: str) -> bool:
    """Whether any process on this file system holds the read lock of a checkpoint."""
    if not isinstance(files, LocalFiles) or files.kind(f"{folder}/{MANIFEST}") != "file":
        return False
    try:
        descriptor = _locked(files, folder, alone=True)
    except BlockingIOError:
        return True
    _unlock(descriptor)
    return False


def _locked(files: Files, folder: str, *, alone: bool) -> int | None:
    """Lock the manifest and return its descriptor; None where it can't be locked."""
    try:
        import fcntl
    except ImportError:
        return None
    # A link would lead out of the run.
    if not isinstance(files, LocalFiles) or files.kind(folder) != "folder":
        return None
    try:
        descriptor = open_here(files.path(f"{folder}/{MANIFEST}"), os.O_RDONLY)
    except OSError:
        return None
    try:
        lock = fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH
        fcntl.flock(descriptor, lock)
    except BlockingIOError:
        close_here(descriptor)
        raise
    except OSError:
        # The file system has no locks.
        close_here(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        close_here(descriptor)
