"""Allow one writer to a run, and protect what a reader holds.

On a local disk the kernel's lock ends with the process that holds it. Elsewhere a lease is renewed
while its holder lives, and taken over once it was not renewed for `LEASE_SECONDS`. The holder is
named in a file beside the lock; one that was taken over finds another name there before it
commits anything.

Proof: `python -m pytest tests/runs/test_store_lock.py tests/runs/test_lock_hosts.py`.
"""

import contextlib
import datetime
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from .files import Files, close_here, keep_from_children, lock_here, open_here
from .layout import MANIFEST_FILE_NAME
from .ranks import LockedRun, RunError

logger = logging.getLogger(__name__)

# Lock a run for a single writer.

LOCK_FILE_NAME = "writer.lock"
LEASE_FILE_NAME = "writer.lease"
HOLDER_FILE_NAME = "writer.json"
MOST_HOLDER_BYTES = 4096
# Every process has to wait as long for a lease.
LEASE_SECONDS = 60.0
POLL_SECONDS = 0.2


class RunLock:
    """The writer lock of a run, from `acquire` to `release` or the end of the process."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock: BaseFileLock | None = None
        self._holder: dict[str, Any] = {}
        self._is_of_parent = False

    def acquire(self, *, wait_seconds: float = 0.0) -> None:
        """Take the lock; raise LockedRun with the name of the holder if it is taken.

        A lease of a process that may be dead is waited for.
        """
        if self._lock is not None:
            return
        lock = self._made()
        until = time.monotonic() + wait_seconds
        lease = self._files.path(LEASE_FILE_NAME)
        first_seen = _renewed(lease)
        while True:
            try:
                lock.acquire(timeout=0)
                break
            except Timeout as error:
                is_undecided = isinstance(lock, SoftFileLease) and _renewed(lease) == first_seen
                if time.monotonic() >= until and not is_undecided:
                    raise LockedRun(
                        f"{self._files.location('')} is held by {self._named()}: end it, or give "
                        f"this run another folder"
                    ) from error
            time.sleep(POLL_SECONDS)
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        token = secrets.token_hex(8)
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        self._lock = lock
        self._holder = {**facts, "token": token}
        self._write_holder()
        keep_from_children(self)

    def _made(self) -> BaseFileLock:
        is_shared = not kernel_locks_reach_all(self._files.path(""))
        path = self._files.path(LEASE_FILE_NAME if is_shared else LOCK_FILE_NAME)
        if is_shared:
            return SoftFileLease(path, lease_duration=LEASE_SECONDS, thread_local=False)
        return FileLock(path, thread_local=False)

    def release(self) -> None:
        self._is_of_parent = False
        if self._lock is None:
            return
        if self._found() == self._holder:
            self._files.remove_file(HOLDER_FILE_NAME)
        self._lock.release()
        self._lock = None

    def leave_behind(self) -> None:
        """Give up the lock in a forked child, because the parent holds it."""
        self._is_of_parent = self._lock is not None
        self._lock = None

    def require_own(self) -> None:
        """Raise LockedRun in a forked child of the process that holds the lock."""
        if self._is_of_parent:
            raise LockedRun(
                f"this process was forked from the process that writes to "
                f"{self._files.location('')}: save in the parent process, and read in this one "
                f"with a SavedRun"
            )

    def require_held(self) -> None:
        """Raise LockedRun if another process took over; call before each change that commits."""
        if self._lock is None or self._found() == self._holder:
            return
        if self._found():
            raise LockedRun(
                f"{self._files.location('')} was taken over by {self._named()}: this process saves "
                f"nothing more; end it, or give this run another folder"
            )
        # The file was deleted or damaged meanwhile.
        self._write_holder()

    def _write_holder(self) -> None:
        self._files.write(HOLDER_FILE_NAME, json.dumps(self._holder).encode())

    def _found(self) -> dict[str, Any]:
        """Return what the file says about the holder; empty if it is missing or damaged."""
        with contextlib.suppress(OSError, ValueError, RecursionError, RunError):
            data = self._files.read(HOLDER_FILE_NAME, most_bytes=MOST_HOLDER_BYTES)
            found = json.loads(data)
            if isinstance(found, dict):
                return found
        return {}

    def _named(self) -> str:
        found = self._found()
        if not found:
            return "another process that just started"
        return (
            f"process {found.get('pid')!s:.20} on {found.get('host')!s:.200} "
            f"since {found.get('since')!s:.40}"
        )


def _renewed(lease: Path) -> int | None:
    """Return when a lease was renewed the last time, by the clock of the file system."""
    try:
        return lease.stat().st_mtime_ns
    except OSError:
        return None


# File systems of one machine, where a kernel lock reaches every process that can write.
_LOCAL_FILE_SYSTEMS = {
    *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs"),
    *("reiserfs", "tmpfs", "xfs", "zfs"),
}
MOUNTS_FILE = Path("/proc/self/mountinfo")


def kernel_locks_reach_all(path: Path) -> bool:
    """Return whether a folder is on a file system of this machine alone.

    Other systems than Linux do not list theirs, and are taken for local ones.
    """
    if not sys.platform.startswith("linux"):
        return True
    try:
        mounts = MOUNTS_FILE.read_text().splitlines()
    except OSError:
        return False
    real = os.path.realpath(path)
    found = ""
    kind = ""
    for line in mounts:
        mount, _, rest = line.partition(" - ")
        # Spaces in the path are written as octal numbers.
        place = mount.split()[4].encode().decode("unicode_escape")
        is_above = real == place or real.startswith(place.rstrip("/") + "/")
        # Of several mounts at one place the last one counts.
        if is_above and len(place) >= len(found):
            found = place
            kind = rest.partition(" ")[0]
    return kind in _LOCAL_FILE_SYSTEMS


# Read locks, so that retention does not remove a checkpoint while it is being read.


@contextlib.contextmanager
def reading(files: Files, folder: str) -> Iterator[bool]:
    """Hold the read lock of a checkpoint; yields whether it could be locked."""
    descriptor = _checkpoint_locked(files, folder, alone=False)
    try:
        yield descriptor is not None
    finally:
        _unlock(descriptor)


def is_being_read(files: Files, folder: str) -> bool:
    """Return whether any process on this file system holds the read lock of a checkpoint."""
    if files.kind(f"{folder}/{MANIFEST_FILE_NAME}") != "file":
        return False
    try:
        descriptor = _checkpoint_locked(files, folder, alone=True)
    except BlockingIOError:
        return True
    _unlock(descriptor)
    return False


def _checkpoint_locked(files: Files, folder: str, *, alone: bool) -> int | None:
    """Lock the manifest and return its descriptor; None where it can't be locked."""
    # A link would lead out of the run.
    if files.kind(folder) != "folder":
        return None
    try:
        # NFS locks a file exclusively only if it is open for writing.
        flags = os.O_RDWR if alone else os.O_RDONLY
        descriptor = open_here(files.path(f"{folder}/{MANIFEST_FILE_NAME}"), flags)
    except OSError:
        return None
    try:
        if not lock_here(descriptor, alone=alone):
            return descriptor
    except BlockingIOError:
        close_here(descriptor)
        raise
    close_here(descriptor)
    return None


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        close_here(descriptor)
