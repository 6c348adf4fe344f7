"""Keep two processes from writing one run.

The lock is one of the kernel, which ends with the process that holds it; a network disk passes it
on to other hosts. The holder is named in a file beside it. A writer whose lock file was deleted
finds another name there before it commits anything.

Proof: `python -m pytest tests/runs/test_store_lock.py`.
"""

import contextlib
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from .files import read, write
from .ranks import LockedRun, RunError
from .values import Facts

LOCK_FILE_NAME = "writer.lock"
HOLDER_FILE_NAME = "writer.json"


class RunLock:
    """The writer lock of a run, from `acquire` to `release` or the end of the process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._holder: Facts = {}

    def acquire(self, *, wait_seconds: float) -> None:
        """Take the lock; raise LockedRun with the name of the holder if it is taken."""
        self._lock = FileLock(self._root / LOCK_FILE_NAME, thread_local=False)
        try:
            self._lock.acquire(timeout=wait_seconds)
        except Timeout as error:
            raise LockedRun(
                f"{self._root} is held by {self._named()}: end it, or give this run another folder"
            ) from error
        self._holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(),
        }
        write(self._root / HOLDER_FILE_NAME, json.dumps(self._holder).encode())

    def release(self) -> None:
        # In a forked child filelock has closed the lock.
        if self._holder.get("pid") == os.getpid():
            self._lock.release()

    def require_own(self) -> None:
        """Raise LockedRun in a forked child of the process that holds the lock."""
        if self._holder and self._holder["pid"] != os.getpid():
            raise LockedRun(
                f"this process was forked from the process that writes to {self._root}: "
                f"save in the parent process, and read in this one with a SavedRun"
            )

    def require_held(self) -> None:
        """Raise LockedRun if another process took over; call before each change that commits."""
        if self._found() not in ({}, self._holder):
            raise LockedRun(
                f"{self._root} was taken over by {self._named()}: this process saves "
                f"nothing more; end it, or give this run another folder"
            )

    def _found(self) -> Facts:
        """Return what the file says about the holder; empty if it is missing or damaged."""
        with contextlib.suppress(OSError, ValueError, RecursionError, RunError):
            found = json.loads(read(self._root / HOLDER_FILE_NAME))
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
