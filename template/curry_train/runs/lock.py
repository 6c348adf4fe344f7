"""Allow one writer to a run, and protect what a reader holds.

A lock file names the holder. Where a kernel lock on that file reaches every process that could
write the run, as on a local disk, it ends with the process, however it ends, and even if its
children live on. Elsewhere the holder also shows signs of life in a file beside it: a holder on
another host that falls silent is taken over, and finds that out before it commits anything.
Without any kernel locks (an object store, NFS without lockd) processes announce themselves, and
go on only if none other has.

Proof: `python -m pytest tests/runs/test_store_lock.py tests/runs/test_lock_hosts.py`.
"""

import contextlib
import datetime
import errno
import json
import logging
import os
import re
import secrets
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import Files, close_here, keep_from_children, open_here
from .heartbeat import SILENCE_SECONDS, Heartbeat, Listener
from .layout import MANIFEST_FILE_NAME
from .ranks import LockedRun

logger = logging.getLogger(__name__)

# Lock a run for a single writer.

LOCK_FILE_NAME = "writer.lock"
BEAT_FILE_PREFIX = "writer.beat."
# Bytes of the longest claim, the JSON in the lock file.
LONGEST_CLAIM_BYTES = 4096
# Time between writing and checking a claim on storage without kernel locks.
SETTLE_SECONDS = 0.2
# Time for the kernel to free the memory of a process that was killed, and with it the lock.
FREEING_SECONDS = 30.0
_TOKEN_PATTERN = re.compile(r"[0-9a-f]{32}")


class RunLock:
    """The writer lock of a run, from `acquire` to `release` or the end of the process."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._descriptor: int | None = None
        self._token = ""
        self._heartbeat: Heartbeat | None = None
        # Watches processes on other hosts, by the file that shows their life.
        self._listeners: dict[str, Listener] = {}
        self.held = False
        # Whether the last `acquire` failed because it is not known yet if the holder is alive, or
        # because it died a moment ago.
        self.is_undecided = False
        self._first_seen_dead: float | None = None
        self._is_of_parent = False

    def acquire(self) -> None:
        """Take the lock; raise LockedRun with the name of the holder if it is taken."""
        if self.held:
            return
        self.is_undecided = False
        self._token = uuid.uuid4().hex
        files = self._files
        if not isinstance(files, Files) or not self._acquire_by_kernel(files):
            self._acquire_by_claim()
        self.held = True
        keep_from_children(self)

    def release(self) -> None:
        self._is_of_parent = False
        if not self.held:
            return
        self.held = False
        # After a takeover the file is the claim of another process.
        is_own = self._is_own()
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        if self._descriptor is not None:
            if is_own:
                os.ftruncate(self._descriptor, 0)
            self._close()
        elif is_own:
            self._files.remove_file(LOCK_FILE_NAME)

    def leave_behind(self) -> None:
        """Give up the lock in a forked child, because the parent holds it."""
        self.held = False
        self._is_of_parent = True
        self._descriptor = None
        self._heartbeat = None

    def require_own(self) -> None:
        """Raise LockedRun in a forked child of the process that holds the lock."""
        if self._is_of_parent:
            raise LockedRun(
                f"this process was forked from the process that writes to "
                f"{self._files.location('')}: save in the parent process, and read in this one "
                f"with a SavedRun"
            )

    def require_held(self) -> None:
        """Raise LockedRun if another process took over; call before each change that commits.

        A lock file that was deleted or damaged meanwhile is written again.
        """
        if not self.held or self._is_own():
            return
        holder = self._holder()
        if holder is None:
            self.held = False
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._close()
            self.acquire()
            return
        raise LockedRun(
            f"{self._files.location(LOCK_FILE_NAME)} was taken over by {_name(holder)}, because "
            f"this process showed no sign of life for {SILENCE_SECONDS:.0f} s: it saves nothing "
            f"more; end it, or give this run another folder"
        )

    def _acquire_by_kernel(self, files: Files) -> bool:
        """Take the lock with a kernel lock; return False where the file system has none."""
        path = files.path(LOCK_FILE_NAME)
        descriptor = _open_lock_file(path)
        try:
            is_free = _lock(descriptor)
            if is_free is None:
                close_here(descriptor)
                return False
            holder = _parse(os.read(descriptor, LONGEST_CLAIM_BYTES))
            if not is_free:
                self.is_undecided = self._is_being_freed(holder)
                raise LockedRun(_run_locked(str(path), holder, free=False))
            reaches_all = kernel_locks_reach_all(path)
            self._require_dead(holder, free_is_proof=reaches_all)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _claim(self._token, beats=not reaches_all), 0)
        except BaseException:
            close_here(descriptor)
            raise
        self._descriptor = descriptor
        if not reaches_all:
            self._begin_to_beat(holder)
        return True

    def _is_being_freed(self, holder: dict[str, Any] | None) -> bool:
        """Check whether the holder has just died: its lock is free once its memory is."""
        if holder is None or is_alive(holder) is not False:
            return False
        if self._first_seen_dead is None:
            self._first_seen_dead = time.monotonic()
        return time.monotonic() - self._first_seen_dead < FREEING_SECONDS

    def _acquire_by_claim(self) -> None:
        """Take the lock without a kernel lock.

        Every process first announces itself, and then looks for others. Of two that come at the
        same time at least one finds the announcement of the other, and gives up.
        """
        files = self._files
        holder = self._holder()
        self._require_dead(holder, free_is_proof=False)
        own = f"{LOCK_FILE_NAME}.{self._token}"
        claim = _claim(self._token, beats=True)
        files.put(own, claim)
        try:
            is_alone = self._is_alone(own)
            if not is_alone or self._holder() != holder:
                where = files.location(LOCK_FILE_NAME)
                raise LockedRun(_run_locked(where, None, free=True))
            files.put(LOCK_FILE_NAME, claim)
        finally:
            files.remove_file(own)
        time.sleep(SETTLE_SECONDS)
        if not self._is_own():
            where = files.location(LOCK_FILE_NAME)
            raise LockedRun(_run_locked(where, self._holder(), free=True))
        self._begin_to_beat(holder)

    def _is_alone(self, own: str) -> bool:
        """Return whether no other process that may be alive has announced itself."""
        for name in self._files.names(""):
            if name == own or not name.startswith(f"{LOCK_FILE_NAME}."):
                continue
            other = self._holder(name)
            alive = None if other is None else is_alive(other)
            if alive or (alive is None and not self._is_silent(name)):
                return False
            with contextlib.suppress(FileNotFoundError):
                self._files.remove_file(name)
        return True

    def _require_dead(self, holder: dict[str, Any] | None, *, free_is_proof: bool) -> None:
        """Raise LockedRun unless there is no holder, or it is known to be dead."""
        if holder is None:
            return
        alive = is_alive(holder)
        if alive is None and holder.get("beats"):
            alive = not self._is_silent(_beat_file(holder))
        elif alive is None and free_is_proof:
            alive = False
        if alive is False:
            if holder.get("host") != socket.gethostname():
                logger.warning("taking over the lock of %s, which is dead", _name(holder))
            return
        where = self._files.location(LOCK_FILE_NAME)
        raise LockedRun(_run_locked(where, holder, free=True))

    def _is_silent(self, key: str) -> bool:
        if key not in self._listeners:
            self._listeners[key] = Listener(self._files, key)
        listener = self._listeners[key]
        is_silent = listener.silent_seconds() > SILENCE_SECONDS
        self.is_undecided = not is_silent and not listener.heard
        return is_silent

    def _begin_to_beat(self, dead: dict[str, Any] | None) -> None:
        self._heartbeat = Heartbeat(self._files, f"{BEAT_FILE_PREFIX}{self._token}")
        self._heartbeat.start()
        if dead is not None and dead.get("beats"):
            with contextlib.suppress(OSError):
                self._files.remove_file(_beat_file(dead))

    def _is_own(self) -> bool:
        """Return whether the lock file is still the one that this process wrote."""
        if self._descriptor is not None and self._heartbeat is None:
            # Nobody can take over while the kernel lock stands, but somebody can delete the file.
            with contextlib.suppress(OSError):
                path = Path(self._files.location(LOCK_FILE_NAME))
                return os.path.samestat(path.stat(), os.fstat(self._descriptor))
            return False
        return (self._holder() or {}).get("token") == self._token

    def _holder(self, name: str = LOCK_FILE_NAME) -> dict[str, Any] | None:
        if self._files.kind(name) != "file":
            return None
        try:
            with self._files.open(name) as stream:
                return _parse(stream.read(LONGEST_CLAIM_BYTES))
        except FileNotFoundError:
            return None

    def _close(self) -> None:
        if self._descriptor is not None:
            close_here(self._descriptor)
            self._descriptor = None


def _open_lock_file(path: Path) -> int:
    """Open the lock file; move aside what is no file, such as a folder or a link."""
    for _ in range(2):
        try:
            descriptor = open_here(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            close_here(descriptor)
        aside = path.with_name(f".{path.name}.damaged-{secrets.token_hex(4)}")
        logger.warning("%s is no file: it is now %s", path, aside.name)
        path.rename(aside)
    raise LockedRun(f"{path} is no file, and comes back when it is moved aside: remove it")


# What flock raises where the file system has no kernel locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def _lock(descriptor: int) -> bool | None:
    """Return whether the kernel lock was free; None where there are no kernel locks."""
    try:
        import fcntl
    except ImportError:
        # Windows has no fcntl.
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


# File systems of one machine, where a kernel lock reaches every process that can write.
_LOCAL_FILE_SYSTEMS = {
    *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs"),
    *("reiserfs", "tmpfs", "xfs", "zfs"),
}
MOUNTS_FILE = Path("/proc/self/mountinfo")


def kernel_locks_reach_all(path: Path) -> bool:
    """Return whether a free kernel lock proves that no process on any host holds it."""
    try:
        mounts = MOUNTS_FILE.read_text().splitlines()
    except OSError:
        return False
    real = os.path.realpath(path)
    found = ""
    kind = ""
    options: set[str] = set()
    for line in mounts:
        mount, _, rest = line.partition(" - ")
        fields = rest.split()
        # Spaces in the path are written as octal numbers.
        place = mount.split()[4].encode().decode("unicode_escape")
        is_above = real == place or real.startswith(place.rstrip("/") + "/")
        # Of several mounts at one place the last one counts.
        if is_above and len(place) >= len(found) and len(fields) >= 3:
            found = place
            kind = fields[0]
            options = set(fields[2].split(","))
    if kind in ("nfs", "nfs4"):
        return "local_lock=none" in options
    if kind == "lustre":
        return "flock" in options and "localflock" not in options
    return kind in _LOCAL_FILE_SYSTEMS or kind == "ceph"


# The identity of a process, for other processes and hosts.


def this_process() -> dict[str, Any]:
    """Return facts by which `is_alive` finds this process, as JSON."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": _machine(),
        "started": _started(os.getpid()),
    }


def _machine() -> str | None:
    """Return what differs between machines, and between containers with their own processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _claim(token: str, *, beats: bool) -> bytes:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    claim = {**this_process(), "since": now, "beats": beats, "token": token}
    return json.dumps(claim).encode()


def _parse(data: bytes) -> dict[str, Any] | None:
    """Return a claim; None if it is empty after a release, torn by a death, or damaged."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    names_process = isinstance(found.get("pid"), int) and isinstance(found.get("host"), str)
    return found if names_process else None


def _beat_file(holder: dict[str, Any]) -> str:
    token = str(holder.get("token"))
    return f"{BEAT_FILE_PREFIX}{token if _TOKEN_PATTERN.fullmatch(token) else 'unknown'}"


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


def is_alive(process: dict[str, Any]) -> bool | None:
    """Return whether a process is running; None if it is on another host or unknown."""
    own_machine = _machine()
    machine = process.get("machine") or own_machine
    if process.get("host") != socket.gethostname() or machine != own_machine:
        return None
    pid = process.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 2**31:
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
    return process.get("started") is None or started is None or started == process["started"]


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"


def _run_locked(where: str, holder: dict[str, Any] | None, *, free: bool) -> str:
    if holder is None:
        return (
            f"{where} is held by another process that just started: wait, or give this run "
            f"another folder"
        )
    held = f"{where} is held by {_name(holder)}"
    alive = is_alive(holder)
    if alive:
        return f"{held}, which is running: end it, or give this run another folder"
    if alive is None and not free:
        return f"{held}, which has a lock on it: end it, or give this run another folder"
    if not free:
        return (
            f"{where} is still locked for {_name(holder)}, which is dead: wait until the system "
            f"has freed its memory"
        )
    if holder.get("beats"):
        return (
            f"{held}, which shows signs of life: end it, or give this run another folder; it is "
            f"taken over once it was silent for {SILENCE_SECONDS:.0f} s"
        )
    return f"{held}, which can't be seen from here: if it is dead, delete {where}"


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
    if not isinstance(files, Files) or files.kind(f"{folder}/{MANIFEST_FILE_NAME}") != "file":
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
    if not isinstance(files, Files) or files.kind(folder) != "folder":
        return None
    try:
        # NFS locks a file exclusively only if it is open for writing.
        flags = os.O_RDWR if alone else os.O_RDONLY
        descriptor = open_here(files.path(f"{folder}/{MANIFEST_FILE_NAME}"), flags)
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
