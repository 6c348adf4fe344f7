"""Open and lock the file of a journal for one writer, and repair a torn last line.

A file that is not a journal, or is the journal of another run or of a newer version, is refused
and stays unchanged.
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

# Characters of a torn line that are copied into the warning event.
MOST_TORN = 1000
NO_LOCK = {errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS}
BEGINS = b'{"v":'


@dataclass
class JournalFile:
    """An open journal file."""

    handle: int
    # The last event in the file.
    last: Event | None = None
    # Remarks on the state of the file, to be written as warning events.
    remarks: list[str] = field(default_factory=list)


def open_journal(path: Path, *, run: str) -> JournalFile:
    """Open, lock and check the journal of a run.

    Raises LockedRun if another process is writing it, and JournalError if the file is not a journal
    of this run.
    """
    try:
        handle = open_here(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise JournalError(f"{path} can't be written: {error.strerror}") from error
    file = JournalFile(handle)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise JournalError(f"{path} is not a regular file: move it away")
        _lock(file, path)
        _settle(file, path, run)
    except BaseException:
        close_here(handle)
        raise
    return file


def _lock(file: JournalFile, path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        # Windows has no fcntl.
        file.remarks.append("no lock on this system: make sure that only one process writes")
        return
    try:
        fcntl.flock(file.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedRun(
            f"{path} is being written by {_writer(file.handle)}: end it, or pass rank= if this "
            f"is another rank of the same run"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCK:
            raise
        file.remarks.append(
            f"no lock on this file system ({error.strerror}): make sure that only one process "
            f"writes"
        )


def _writer(handle: int) -> str:
    with contextlib.suppress(NewerJournal):
        for event in _from_end(handle):
            if type(pid := event.facts.get("pid")) is int:
                return f"process {pid}, or a child of it"
    return "another process"


def _settle(file: JournalFile, path: Path, run: str) -> None:
    """Check that the file is a journal of this run, find its last event and repair a torn end."""
    size = os.fstat(file.handle).st_size
    if not size:
        return

    torn = _after_last_newline(file.handle, size)
    if len(torn) == size and not isinstance(parse_event(torn, line=0), Event):
        if not (torn.startswith(BEGINS) or BEGINS.startswith(torn)):
            raise JournalError(
                f"{path} is not a journal of a run, and was not changed: move it away"
            )
    elif (owner := _owner(path)) != run and owner is not None:
        raise JournalError(
            f"{path} belongs to the run {printable(owner)} and this run is {printable(run)}: "
            f"rename the folder back, or move the journal away and this run begins its own"
        )

    try:
        file.last = next(_from_end(file.handle), None)
    except NewerJournal as error:
        raise NewerJournal(f"{path}: {error}") from None
    if file.last is None and len(torn) < size:
        # The last event is far from the end, so read the whole journal.
        for event in JournalReading(path):
            file.last = event

    if torn:
        _set_aside(file, torn, size)


def _owner(path: Path) -> str | None:
    """Return the run named at the beginning; raise JournalError if there is no event."""
    reading = JournalReading(path)
    for number, _ in enumerate(reading):
        if reading.run is not None or number == HEAD:
            break
    return reading.run


def _set_aside(file: JournalFile, torn: bytes, size: int) -> None:
    """Repair a file whose last line has no newline.

    Add the newline to a line that is whole or too long; move any other torn line into a remark.
    """
    if len(torn) > LONGEST or isinstance(parse_event(torn, line=0), Event):
        os.write(file.handle, b"\n")
        return
    os.ftruncate(file.handle, size - len(torn))
    shown = torn[:MOST_TORN].decode("utf-8", "backslashreplace")
    file.remarks.append(f"the last line was torn after {len(torn)} bytes: {shown}")


def _after_last_newline(handle: int, size: int) -> bytes:
    """Return the bytes after the last newline, at most one more than the longest line has."""
    start = max(0, size - LONGEST - 1)
    end = _read(handle, start, size)
    return end[end.rfind(b"\n") + 1 :]


def _from_end(handle: int) -> Iterator[Event]:
    """Yield the events in the last `2 * LONGEST` bytes, the newest first."""
    size = os.fstat(handle).st_size
    start = max(0, size - 2 * LONGEST)
    lines = _read(handle, start, size).split(b"\n")
    for text in reversed(lines[1:] if start else lines):
        if text and isinstance(event := parse_event(text, line=0), Event):
            yield event


def _read(handle: int, start: int, end: int) -> bytes:
    """Read a range of bytes; a single `pread` may return fewer than requested."""
    chunks = []
    while start < end and (chunk := os.pread(handle, end - start, start)):
        chunks.append(chunk)
        start += len(chunk)
    return b"".join(chunks)
