"""One writer for each run: a file says who, and the kernel's lock on it ends with the process, however that ends.

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
from typing import Any, BinaryIO

from .errors import LockedRun
from .files import Files, LocalFiles

NAME = "writer.lock"
SETTLE_SECONDS = 0.2  # between claim and second look, where nothing creates a file exclusively


class RunLock:
    """Take it with `acquire`, give it back with `release`; a process that dies gives it back as well."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._stream: BinaryIO | None = None
        self.held = False

    def acquire(self) -> None:
        """Raises LockedRun, which names the holder."""
        if self.held:
            return
        if isinstance(self._files, LocalFiles):
            self._acquire_locally(self._files)
        else:
            self._acquire_by_file()
        self.held = True

    def release(self) -> None:
        if not self.held:
            return
        self.held = False
        if self._stream is not None:
            self._stream.truncate(0)
            self._stream.close()
            self._stream = None
        else:
            self._files.remove_file(NAME)

    def _acquire_locally(self, files: LocalFiles) -> None:
        path = files.path(NAME)
        stream: Any = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644), "r+b")
        try:
            free, holder = _lock(stream), _parse(stream.read())
            if not free or (holder is not None and _alive(holder) is not False):
                raise LockedRun(_locked(str(path), holder, free=free))
            stream.seek(0)
            stream.truncate()
            stream.write(_claim(uuid.uuid4().hex))
            stream.flush()
        except BaseException:
            stream.close()
            raise
        self._stream = stream

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


def _lock(stream: BinaryIO) -> bool:
    try:
        import fcntl
    except ImportError:  # not on Windows: the file alone counts
        return True
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True


def _claim(token: str) -> bytes:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now, "started": _started(os.getpid())}
    return json.dumps({**holder, "token": token}).encode()


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None  # empty, since it was released, or torn, since its writer died
    return found if isinstance(found, dict) else None


def _started(pid: int) -> str | None:
    """When a process began, as the kernel counts, so that another one of its number is told apart."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


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
    started = _started(pid)
    return holder.get("started") is None or started is None or started == holder["started"]


def _locked(where: str, holder: dict[str, Any] | None, *, free: bool) -> str:
    if holder is None:
        return f"{where} is held by another process that just began: wait, or give this run another folder"
    who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
    alive = _alive(holder)
    if alive:
        return f"{where} is held by {who}, which is running: end it, or give this run another folder"
    if not free:
        return f"{where} is held by a child of {who}, which is dead: end its children, such as DataLoader workers"
    return f"{where} is held by {who}, which can't be seen from here: if it is dead, delete {where}"
