"""Keep two processes from writing one run.

The lock is one of the kernel, which ends with the process that holds it; a network disk passes it
on to other hosts. The holder is named in a file beside it. A writer whose lock file was deleted
finds another name there before it commits anything.

Proof: `python -m pytest tests/runs/test_store_lock.py`.
"""

import contextlib
import os
import re
import socket
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from .files import read, write
from .ranks import LockedRun, RunError

LOCK_FILE_NAME = "writer.lock"
HOLDER_FILE_NAME = "writer.txt"
_HOLDER_PATTERN = re.compile(r"process \d{1,20} on [\w.-]{1,255} since [\d:T.+-]{1,40}")


class RunLock:
    """The writer lock of a run, from `acquire` to `release` or the end of the process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # The process that took the lock, and its name in the file.
        self._process = 0
        self._name = ""

    def acquire(self, *, wait_seconds: float) -> None:
        """Take the lock; raise LockedRun with the name of the holder if it is taken."""
        self._lock = FileLock(self._root / LOCK_FILE_NAME, thread_local=False)
        try:
            self._lock.acquire(timeout=wait_seconds)
        except Timeout as error:
            holder = self._read_holder() or "another process that just started"
            raise LockedRun(
                f"{self._root} is held by {holder}: end it, or give this run another folder"
            ) from error
        self._process = os.getpid()
        now = datetime.now(UTC).isoformat()
        self._name = f"process {self._process} on {socket.gethostname()} since {now}"
        write(self._root / HOLDER_FILE_NAME, self._name.encode())

    def release(self) -> None:
        # In a forked child filelock has closed the lock.
        if self._process == os.getpid():
            self._lock.release()

    def require_own(self) -> None:
        """Raise LockedRun in a forked child of the process that holds the lock."""
        if self._process not in (0, os.getpid()):
            raise LockedRun(
                f"this process was forked from the process that writes to {self._root}: "
                f"save in the parent process, and read in this one with a SavedRun"
            )

    def require_held(self) -> None:
        """Raise LockedRun if another process took over; call before each change that commits."""
        holder = self._read_holder()
        if holder not in ("", self._name):
            raise LockedRun(
                f"{self._root} was taken over by {holder}: this process saves "
                f"nothing more; end it, or give this run another folder"
            )

    def _read_holder(self) -> str:
        """Return the name in the file; nothing if the file is missing or damaged."""
        with contextlib.suppress(OSError, UnicodeDecodeError, RunError):
            name = read(self._root / HOLDER_FILE_NAME).decode()
            if _HOLDER_PATTERN.fullmatch(name):
                return name
        return ""
