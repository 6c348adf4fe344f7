"""One writer for each run: a file says who, and the kernel's lock on it ends with the process, however that ends, and
though children of it live on.

Where no kernel lock is (an object store), the file alone counts: a holder that died on this host is recognised by its
number and start time, one on another host has to be released by hand.
Proof: `python -m pytest tests/test_store_lock.py`.
"""

import datetime
import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from .errors import LockedRun
from .files import Files, LocalFiles
from .forked import close_here, keep_from_children, open_here

NAME = "writer.lock"
LONGEST = 4096  # bytes of a claim
SETTLE_SECONDS = 0.2  # between claim and second look, where nothing creates a file exclusively


class RunLock:
    """Take it with `acquire`, give it back with `release`; a process that dies gives it back as well."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._descriptor: int | None = None
        self.held = self._is_of_parent = False

    def acquire(self) -> None:
        """Raises LockedRun, which names the holder."""
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
            self._files.remove_file(NAME)

    def leave_behind(self) -> None:
        """In a child that was forked, where the descriptor is closed: the parent holds the lock."""
        self.held, self._is_of_parent, self._descriptor = False, True, None

    def require_own(self) -> None:
        """Raises LockedRun in a child of the process that holds the lock."""
        if self._is_of_parent:
            raise LockedRun(
                f"this process was forked from the process that writes here, {self._files.location('')}: save there, "
                f"and read here with a SavedRun"
            )

    def _acquire_locally(self, files: LocalFiles) -> None:
        path = files.path(NAME)
        descriptor = open_here(path, os.O_RDWR | os.O_CREAT)
        try:
            free, holder = _lock(descriptor), _parse(os.read(descriptor, LONGEST))
            if not free or (holder is not None and _alive(holder) is not False):
                raise LockedRun(_locked(str(path), holder, free=free))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _claim(uuid.uuid4().hex), 0)
        except BaseException:
            close_here(descriptor)
            raise
        self._descriptor = descriptor

    def _acquire_by_file(self) -> None:
        token, where = uuid.uuid4().hex, self._files.location(NAME)
        holder = self._holder()
        if holder is not None:
            if _alive(holder) is not False:
                raise LockedRun(_locked(where, holder, free=True))
            self._files.remove_file(NAME)
        self._files.write(NAME, _claim(token))
        time.sleep(SETTLE_SECONDS)
        holder = self._holder()
        if holder is None or holder.get("token") != token:
            raise LockedRun(_locked(where, holder, free=True))

    def _holder(self) -> dict[str, Any] | None:
        return _parse(self._files.read(NAME)) if self._files.kind(NAME) == "file" else None


def _lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # not on Windows: the file alone counts
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
        return None  # empty, since it was released, or torn, since its writer died
    return found if isinstance(found, dict) else None


def _started(pid: int) -> str | None:
    """When a process began, as the kernel counts, so that another one of its number is told apart."""
    facts = _facts(pid)
    return facts[19] if facts else None


def _facts(pid: int) -> list[str] | None:
    """What the kernel says of a process, from its state on."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return facts if len(facts) > 19 else None


def _alive(holder: dict[str, Any]) -> bool | None:
    """Whether the holder lives; None where that can't be seen from here."""
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
    if (
        facts and facts[0] in "ZX"
    ):  # dead, and nobody waited for it, as in a container whose first process never does
        return False
    started = _started(pid)
    return holder.get("started") is None or started is None or started == holder["started"]


def _locked(where: str, holder: dict[str, Any] | None, *, free: bool) -> str:
    if holder is None:
        return f"{where} is held by another process that just began: wait, or give this run another folder"
    who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
    alive = _alive(holder)
    if alive:
        return (
            f"{where} is held by {who}, which is running: end it, or give this run another folder"
        )
    if not free:
        return f"{where} is held still for {who}, which is dead: wait until the system has cleared it away"
    return f"{where} is held by {who}, which can't be seen from here: if it is dead, delete {where}"
