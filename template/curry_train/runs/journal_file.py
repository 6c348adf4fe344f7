"""The file of a journal, opened for one writer: locked, its torn end set aside, and known to be this run's.

What is not a journal, another run's, or a newer version's is refused and stays as it is.
Proof: `python -m pytest tests/test_journal.py tests/test_journal_kill.py`.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .errors import LockedRun
from .forked import close_here, open_here
from .journal_lines import LONGEST, Event, JournalError, NewerJournal, parse_event, printable
from .journal_reading import HEAD, JournalReading

MOST_TORN = 1000  # characters of a torn line that are kept
NO_LOCK = {errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS}
BEGINS = b'{"v":'


@dataclass
class JournalFile:
    """An open file, the last event in it, and what is to be said of its state in warning events."""

    handle: int
    last: Event | None = None
    remarks: list[str] = field(default_factory=list)


def open_journal(path: Path, *, run: str) -> JournalFile:
    """Raises LockedRun where another process writes it, and JournalError where it is not this run's to write."""
    try:
        handle = open_here(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise JournalError(f"{path} can't be written: {error.strerror}") from error
    file = JournalFile(handle)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise JournalError(f"{path} is no file: move it away")
        _lock(file, path)
        _settle(file, path, run)
    except BaseException:
        close_here(handle)
        raise
    return file


def _lock(file: JournalFile, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        file.remarks.append("no lock on this system: see to it that one process writes")
        return
    try:
        fcntl.flock(file.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedRun(
            f"{path} is written by {_writer(file.handle)}: end it, or give rank= where it is a rank of the same run"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCK:
            raise
        file.remarks.append(
            f"no lock on this file system ({error.strerror}): see to it that one process writes"
        )


def _writer(handle: int) -> str:
    with contextlib.suppress(NewerJournal):
        for event in _from_end(handle):
            if type(pid := event.facts.get("pid")) is int:
                return f"process {pid}, or a child of it"
    return "another process"


def _settle(file: JournalFile, path: Path, run: str) -> None:
    size = os.fstat(file.handle).st_size
    if not size:
        return
    torn = _after_last_newline(file.handle, size)
    if len(torn) == size and not isinstance(parse_event(torn, line=0), Event):
        if not (torn.startswith(BEGINS) or BEGINS.startswith(torn)):
            raise JournalError(f"{path} is no journal of a run, and was not changed: move it away")
    elif (owner := _owner(path)) != run and owner is not None:
        raise JournalError(
            f"{path} is of the run {printable(owner)} and this one is {printable(run)}: give the folder its name back, "
            "or move the journal away, and this run begins its own"
        )
    try:
        file.last = next(_from_end(file.handle), None)
    except NewerJournal as error:
        raise NewerJournal(f"{path}: {error}") from None
    if file.last is None and len(torn) < size:
        for event in JournalReading(path):  # far from the end
            file.last = event
    if torn:
        _set_aside(file, torn, size)


def _owner(path: Path) -> str | None:
    """The run that the journal begins with; an error where the file holds no event."""
    reading = JournalReading(path)
    for number, _ in enumerate(reading):
        if reading.run is not None or number == HEAD:
            break
    return reading.run


def _set_aside(file: JournalFile, torn: bytes, size: int) -> None:
    """The last line again, where only its end was missing; else what is left of it goes into a warning event."""
    if len(torn) > LONGEST or isinstance(parse_event(torn, line=0), Event):
        os.write(file.handle, b"\n")
        return
    os.ftruncate(file.handle, size - len(torn))
    shown = torn[:MOST_TORN].decode("utf-8", "backslashreplace")
    file.remarks.append(f"the last line was torn after {len(torn)} bytes: {shown}")


def _after_last_newline(handle: int, size: int) -> bytes:
    """Up to a little more than the longest line."""
    start = max(0, size - LONGEST - 1)
    end = _read(handle, start, size)
    return end[end.rfind(b"\n") + 1 :]


def _from_end(handle: int) -> Iterator[Event]:
    """The events of the last two longest lines' length, the newest first."""
    size = os.fstat(handle).st_size
    start = max(0, size - 2 * LONGEST)
    lines = _read(handle, start, size).split(b"\n")
    for text in reversed(lines[1:] if start else lines):
        if text and isinstance(event := parse_event(text, line=0), Event):
            yield event


def _read(handle: int, start: int, end: int) -> bytes:
    """A read may return less than it was asked for."""
    parts = []
    while start < end and (part := os.pread(handle, end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)
