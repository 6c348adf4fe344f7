"""Record what happened in a run: one process writes, one JSON line for each event.

    with Journal("runs/run-001", rank=rank, facts=run_facts(config, device=device)) as journal:
        journal.write("step", step=1, loss=4.2, learning_rate=3e-4, seconds=0.1, peak_bytes=2**30)
        journal.write("save", step=100, checkpoint="rollback/step-00000100.dcp")
        journal.write("rollback", step=100, from_step=180, reason="loss 9.1 after 4.0")
        journal.write("stop", step=300, reason="steps")

Only one process of the run may write. Each line has `v`, `time`, `step`, `attempt` and `kind`; each
resume or rollback opens a new attempt. A line is a single append and is in the file when the call
returns, so that a kill can tear the last line at most. Readers skip such a line and count it. A
full disk loses events, with a warning, but does not stop the training.

Proof: `python -m pytest tests/runs/test_journal.py tests/runs/test_journal_reading.py`.
"""

import collections
import contextlib
import errno
import functools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .files import StrPath
from .ranks import RunError
from .values import Facts, Values

# Encode and parse one line of a journal: an event as JSON.

logger = logging.getLogger(__name__)
JOURNAL_VERSION = 1
OPENING_EVENT_KINDS = ("start", "resume", "rollback")
EVENT_KEYS = ("v", "time", "step", "attempt", "kind")
# Bytes of the longest line, with its newline. Of a longer one each piece is damage.
LONGEST_LINE_BYTES = 2**20
# A step or attempt of this size or more is damage.
EVENT_NUMBER_LIMIT = 10**15


class JournalError(RunError):
    """A journal can't be read, or can't be written."""


class NoEvents(JournalError):
    """A journal has no whole line yet."""


class Event(NamedTuple):
    """One event of a journal; `facts` holds all fields without their own attribute."""

    time: float
    step: int
    attempt: int
    kind: str
    facts: Facts


def encode_event(kind: str, facts: Values, *, time: float, step: int, attempt: int) -> bytes:
    """Encode an event as a line with its newline."""
    own: Facts = {
        "v": JOURNAL_VERSION,
        "time": round(time, 3),
        "step": step,
        "attempt": attempt,
        "kind": kind,
    }
    if taken := own.keys() & facts.keys():
        raise ValueError(
            f"{kind} of step {step} can't have facts called {', '.join(sorted(taken))}: rename them"
        )
    try:
        return _ENCODE_JSON(finite({**own, **facts})).encode("ascii") + b"\n"
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{kind} of step {step} can't be written as JSON ({error}): pass numbers, text, lists "
            f"and mappings"
        ) from error


def finite(value: Any) -> Any:
    """Replace figures that JSON can't represent with the strings nan, inf and -inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _to_plain(value: Any) -> Any:
    """Return a figure of torch or numpy as a number, and anything else as text."""
    item = getattr(value, "item", None)
    return finite(item()) if callable(item) else str(value)


_ENCODE_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_to_plain).encode
_DECODE_JSON = json.JSONDecoder().decode


def parse_event(text: bytes) -> Event | None:
    """Return the event of a line, or None if it holds none."""
    try:
        facts = _DECODE_JSON(text.decode())
        version, moment, step, attempt, kind = [facts.pop(name) for name in EVENT_KEYS]
        moment = float(moment)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    if (version, type(kind), type(step), type(attempt)) != (JOURNAL_VERSION, str, int, int):
        return None
    fits = 0 <= step < EVENT_NUMBER_LIMIT and 1 <= attempt < EVENT_NUMBER_LIMIT
    return Event(moment, step, attempt, kind, facts) if fits else None


def event_number(value: Any) -> float:
    """Convert a figure of an event to a float.

    The strings inf and -inf are figures; anything else that is not a number becomes nan.
    """
    is_number = type(value) in (int, float) or value in ("inf", "-inf")
    try:
        return float(value) if is_number else math.nan
    except OverflowError:
        return math.nan


def printable(text: str, *, longest: int = 300) -> str:
    """Escape text from a file for a terminal: control characters, and what can't be encoded."""
    shown = "".join(
        letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: longest + 1]
    )
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


# Read the events of a journal from the disk, even if the file is damaged.

JOURNAL_FILE_NAME = "journal.jsonl"


def read_events(path: StrPath, damaged: list[int]) -> Iterator[Event]:
    """Yield the events of a journal; the numbers of lines that are no event go into `damaged`.

    An incomplete last line is not damage: its writer died, or is still writing it. Raises
    JournalError where the file has no event.
    """
    is_empty = True
    try:
        with Path(path).open("rb") as file:
            lines = iter(functools.partial(file.readline, LONGEST_LINE_BYTES), b"")
            for number, line in enumerate(lines, start=1):
                event = parse_event(line)
                if event is not None:
                    is_empty = False
                    yield event
                elif line[-1:] == b"\n" or len(line) == LONGEST_LINE_BYTES:
                    damaged.append(number)
    except OSError as error:
        raise JournalError(f"{path} can't be read: {error.strerror}") from error
    if is_empty and damaged:
        raise JournalError(
            f"{path} is not a journal of a run: line {damaged[0]} is no event; move it away"
        )
    if is_empty:
        raise NoEvents(
            f"{path} holds no event: the run died while it started, or is starting just now"
        )


# Write the journal of a run, `journal.jsonl`, with one event per line.

# Events that are synced to the disk, so that they survive a loss of power.
SYNCED_EVENT_KINDS = {"start", "resume", "rollback", "save", "stop"}


class Journal:
    """The journal of a run's folder, open for writing by rank 0; other ranks write nothing.

    It begins an attempt from the state of `step`: the first one at step 0 is the start of the run,
    and any other one resumes it. `facts` are the result of `run_facts`.
    """

    def __init__(
        self,
        folder: StrPath,
        *,
        step: int = 0,
        facts: Mapping[str, Any] = {},
        rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(folder) / JOURNAL_FILE_NAME
        self.writes = rank == 0
        self._clock = clock
        # Whether the last line has no newline: its writer died.
        self._torn = False
        # Whether the last event could not be written.
        self._is_losing = False
        last = self._open() if self.writes else None
        self.attempt = last.attempt if last else 0
        self.write("resume" if self.attempt or step else "start", step=step, **facts)
        if last and step > last.step:
            missing = f"steps {last.step + 1} to {step} are not in this journal"
            self.write("warning", step=step, reason=missing)

    def _open(self) -> Event | None:
        """Open the file, and return its last event."""
        last = None
        with contextlib.suppress(NoEvents):
            if self.path.is_file():
                last = collections.deque(read_events(self.path, []), maxlen=1).pop()
        try:
            # Without a buffer, so that a line is a single append.
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise JournalError(f"{self.path} can't be written: {error.strerror}") from error
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            self._torn = self._file.read(1) != b"\n"
        return last

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def write(self, kind: str, *, step: int, **facts: Any) -> None:
        """Write an event: step, save, prune, eval, spike, skip, rollback, warning or stop.

        A step has figures, such as `loss`, `learning_rate` and `seconds`, and an eval `metric` and
        `value`. A rollback to the state of `step` has `from_step`. It has a `reason`, as a spike,
        skip, warning or stop has.
        """
        if not self.writes:
            return
        if type(step) is not int or step < 0:
            raise ValueError(f"a step is a whole number from 0, got {step!r}")
        attempt = self.attempt + (kind in OPENING_EVENT_KINDS)
        line = encode_event(kind, facts, time=self._clock(), step=step, attempt=attempt)
        self.attempt = attempt
        # With one call, on a new line after a torn one.
        line = b"\n" + line if self._torn else line
        try:
            self._torn = self._file.write(line) < len(line)
            why = os.strerror(errno.ENOSPC) if self._torn else ""
            if kind in SYNCED_EVENT_KINDS:
                os.fsync(self._file.fileno())
        except OSError as error:
            why = error.strerror or str(error)
        if why and not self._is_losing:
            logger.warning("%s: %s; training goes on without its journal", self.path, why)
        self._is_losing = bool(why)

    def close(self) -> None:
        """Close the file. Write the event `stop` with its reason before this call."""
        if self.writes:
            self._file.close()
