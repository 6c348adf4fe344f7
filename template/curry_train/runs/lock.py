"""Allow one writer to a run, and protect what a reader holds.

A lock file names the holder. On a local disk a kernel lock on that file ends with the process,
however it ends, and even if its children live on. Without kernel locks (an object store), the file
alone counts: a dead holder on this host is recognized by its process number and start time; the
lock of a dead holder on another host has to be deleted by hand.

Proof: `python -m pytest tests/runs/test_store_lock.py tests/runs/test_reading.py`.
"""

import contextlib
import datetime
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import Files, LocalFiles, close_here, keep_from_children, open_here
from .layout import MANIFEST_FILE_NAME
from .ranks import LockedRun

# Lock a run for a single writer.

LOCK_FILE_NAME = "writer.lock"
# Bytes of the longest claim, the JSON in the lock file.
LONGEST_CLAIM_BYTES = 4096
# Time between writing and checking a claim on storage that can't create a file exclusively.
SETTLE_SECONDS = 0.2


class RunLock:
    """The writer lock of a run, from `acquire` to `release` or the end of the process."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._descriptor: int | None = None
        self.held = False
        self._is_of_parent = False

    def acquire(self) -> None:
        """Take the lock; raise LockedRun with the name of the holder if it is taken."""
        if self.held:
            return
        if isinstance(self._files, LocalFiles):
            self._acquire_locally(self._files)
        else:
            self._acquire_by_file()
        self.held = True
        keep_from_children(self)

    def release(self) -> None:
        self._is_of_parent = False
        if not self.held:
            return
        self.held = False
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            close_here(self._descriptor)
            self._descriptor = None
        else:
            self._files.remove_file(LOCK_FILE_NAME)

    def leave_behind(self) -> None:
        """Give up the lock in a forked child, because the parent holds it."""
        self.held = False
        self._is_of_parent = True
        self._descriptor = None

    def require_own(self) -> None:
        """Raise LockedRun in a forked child of the process that holds the lock."""
        if self._is_of_parent:
            raise LockedRun(
                f"this process was forked from the process that writes to "
                f"{self._files.location('')}: save in the parent process, and read in this one "
                f"with a SavedRun"
            )

    def _acquire_locally(self, files: LocalFiles) -> None:
        path = files.path(LOCK_FILE_NAME)
        descriptor = open_here(path, os.O_RDWR | os.O_CREAT)
        try:
            free = _lock(descriptor)
            holder = _parse(os.read(descriptor, LONGEST_CLAIM_BYTES))
            if not free or (holder is not None and _alive(holder) is not False):
                raise LockedRun(_run_locked(str(path), holder, free=free))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _claim(uuid.uuid4().hex), 0)
        except BaseException:
            close_here(descriptor)
            raise
        self._descriptor = descriptor

    def _acquire_by_file(self) -> None:
        token = uuid.uuid4().hex
        where = self._files.location(LOCK_FILE_NAME)
        holder = self._holder()
        if holder is not None:
            if _alive(holder) is not False:
                raise LockedRun(_run_locked(where, holder, free=True))
            self._files.remove_file(LOCK_FILE_NAME)

        # Another process may write its claim at the same moment; the last claim wins.
        self._files.write(LOCK_FILE_NAME, _claim(token))
        time.sleep(SETTLE_SECONDS)
        holder = self._holder()
        if holder is None or holder.get("token") != token:
            raise LockedRun(_run_locked(where, holder, free=True))

    def _holder(self) -> dict[str, Any] | None:
        if self._files.kind(LOCK_FILE_NAME) != "file":
            return None
        return _parse(self._files.read(LOCK_FILE_NAME))


def _lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:
        # Windows has no fcntl, so the file alone counts.
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True


def _claim(token: str) -> bytes:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": now,
        "started": _started(os.getpid()),
    }
    return json.dumps({**holder, "token": token}).encode()


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except ValueError:
        # The file is empty after a release, or torn because its writer died.
        return None
    return found if isinstance(found, dict) else None


def _started(pid: int) -> str | None:
    """Return the kernel's start time of a process, which detects that a number was reused."""
    facts = _facts(pid)
    return facts[19] if facts else None


def _facts(pid: int) -> list[str] | None:
    """Return the fields of `/proc/PID/stat` from the state on, or None."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return facts if len(facts) > 19 else None


def _alive(holder: dict[str, Any]) -> bool | None:
    """Return whether the holder is running; None if it is on another host or unknown."""
    if holder.get("host") != socket.gethostname():
        return None
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    facts = _facts(pid)
    if facts and facts[0] in "ZX":
        # A dead process that its parent has not reaped, as in a container without an init process.
        return False
    started = _started(pid)
    return holder.get("started") is None or started is None or started == holder["started"]


def _run_locked(where: str, holder: dict[str, Any] | None, *, free: bool) -> str:
    if holder is None:
        return (
            f"{where} is held by another process that just started: wait, or give this run "
            f"another folder"
        )
    who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
    alive = _alive(holder)
    if alive:
        return (
            f"{where} is held by {who}, which is running: end it, or give this run another folder"
        )
    if not free:
        return (
            f"{where} is still locked for {who}, which is dead: wait until the system has freed "
            f"its memory"
        )
    return f"{where} is held by {who}, which can't be seen from here: if it is dead, delete {where}"


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
    if not isinstance(files, LocalFiles) or files.kind(f"{folder}/{MANIFEST_FILE_NAME}") != "file":
        return False
    try:
        descriptor = _checkpoint_locked(files, folder, alone=True)
    except BlockingIOError:
        return True
    _unlock(descriptor)
    return False


def _checkpoint_locked(files: Files, folder: str, *, alone: bool) -> int | None:
    """Lock the manifest and return its descriptor; None where it can't be locked."""
    try:
        import fcntl
    except ImportError:
        return None
    # A link would lead out of the run.
    if not isinstance(files, LocalFiles) or files.kind(folder) != "folder":
        return None
    try:
        descriptor = open_here(files.path(f"{folder}/{MANIFEST_FILE_NAME}"), os.O_RDONLY)
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
