"""Record what happened in a run: one process writes, one JSON line for each event.

    with Journal("runs/run-001", rank=rank) as journal:
        journal.start(facts=run_facts(config, device=device))  # or journal.resume(500, facts=...)
        journal.step(1, loss=4.2, learning_rate=3e-4, seconds=0.1, peak_bytes=2**30)
        journal.write("save", step=100, checkpoint="rollback/step-00000100.dcp")
        journal.rollback(100, from_step=180, reason="loss 9.1 after 4.0")
        journal.write("stop", step=300, reason="steps")

Only one process of the run writes. Each line has `v`, `time`, `step`, `attempt` and `kind`; each
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
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .files import StrPath, close_here, keep_from_children, lock_here, open_here
from .layout import describe_existing_runs
from .ranks import LockedRun, RunError

# Encode and parse one line of a journal: an event as JSON.

logger = logging.getLogger(__name__)
JOURNAL_VERSION = 1
OPENING_EVENT_KINDS = ("start", "resume", "rollback")
EVENT_KINDS = (
    *OPENING_EVENT_KINDS,
    "step",
    "save",
    "prune",
    "eval",
    "spike",
    "skip",
    "warning",
    "stop",
)
EVENT_KEYS = ("v", "time", "step", "attempt", "kind")
# Bytes of the longest line, with its newline. Of a longer one each piece is damage.
LONGEST_LINE_BYTES = 2**20
# A time, step or attempt of this size or more is damage.
EVENT_NUMBER_LIMIT = 10**15


class JournalError(RunError):
    """A journal can't be read, or can't be written."""


class Event(NamedTuple):
    """One event of a journal; `facts` holds all fields without their own attribute."""

    time: float
    step: int
    attempt: int
    kind: str
    facts: dict[str, Any]


def encode_event(
    kind: str,
    facts: Mapping[str, Any],
    *,
    time: float,
    step: int,
    attempt: int,
    run: str | None = None,
) -> bytes:
    """Encode an event as a line with its newline.

    `run` belongs into the event that opens an attempt; the version is in every event.
    """
    if taken := {*EVENT_KEYS, "run"} & facts.keys():
        raise ValueError(
            f"{kind} of step {step} can't have facts called {', '.join(sorted(taken))}: rename them"
        )
    event: dict[str, Any] = {
        "v": JOURNAL_VERSION,
        "time": round(time, 3),
        "step": step,
        "attempt": attempt,
        "kind": kind,
    }
    if run is not None:
        event["run"] = run
    event.update(facts)
    try:
        line = _ENCODE_JSON(finite(event))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{kind} of step {step} can't be written as JSON ({error}): pass numbers, text, lists "
            f"and mappings"
        ) from error
    if len(line) >= LONGEST_LINE_BYTES:
        raise ValueError(
            f"{kind} of step {step} takes {len(line)} bytes, and the limit is "
            f"{LONGEST_LINE_BYTES - 1}: shorten its facts"
        )
    return line.encode("ascii") + b"\n"


def finite(value: Any) -> Any:
    """Replace figures that JSON can't represent with the strings nan, inf and -inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _plain(value: Any) -> Any:
    """Convert paths, mappings, and figures of torch and numpy for the JSON encoder."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(item := getattr(value, "item", None)):
        return finite(item())
    raise TypeError(f"it contains a {type(value).__name__}")


_ENCODE_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode
_DECODE_JSON = json.JSONDecoder().decode


def parse_event(text: bytes) -> Event | None:
    """Return the event of a line, or None if it holds none."""
    try:
        facts = _DECODE_JSON(text.decode())
        version, moment, step, attempt, kind = [facts.pop(name) for name in EVENT_KEYS]
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    # True and 1.0 are equal to 1, and no journal has them.
    is_event = (
        type(version) is type(step) is type(attempt) is int
        and (version == JOURNAL_VERSION and type(kind) is str and type(moment) in (int, float))
        and (0 <= step < EVENT_NUMBER_LIMIT and 1 <= attempt < EVENT_NUMBER_LIMIT)
        and abs(moment) < EVENT_NUMBER_LIMIT
    )
    return Event(moment, step, attempt, kind, facts) if is_event else None


def event_number(value: Any) -> float:
    """Convert a figure of an event to a float.

    The strings inf and -inf are figures; anything else that is not a number becomes nan.
    """
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < 2**1000:
        return float(value)
    if type(value) is str and value in ("inf", "-inf"):
        return float(value)
    return float("nan")


def printable(text: str, *, longest: int = 300) -> str:
    """Escape text from a file for a terminal: control characters, and what can't be encoded."""
    shown = "".join(
        letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: longest + 1]
    )
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


# Stream the events of a journal from the disk, even if the file is damaged.

JOURNAL_FILE_NAME = "journal.jsonl"


class JournalReading:
    """An iterator over the events of a journal; its other attributes are complete afterwards.

    Lines that are no event are counted. `torn` holds an incomplete last line: its writer died, or
    is still writing it. `attempt` is the last attempt to read.
    """

    def __init__(self, path: StrPath, *, attempt: int | None = None) -> None:
        self.path = journal_path(path)
        self.run: str | None = None
        self.num_damaged = 0
        self.first_damaged: int | None = None
        self.torn = b""
        self._attempt = attempt

    def __iter__(self) -> Iterator[Event]:
        is_empty = True
        try:
            with self.path.open("rb") as file:
                for event in self._events(file):
                    is_empty = False
                    yield event
        except OSError as error:
            raise JournalError(f"{self.path} can't be read: {error.strerror}") from error
        if is_empty and self.num_damaged:
            raise JournalError(
                f"{self.path} is not a journal of a run: line {self.first_damaged} is no event"
            )
        if is_empty:
            torn = " except a torn one" if self.torn else ""
            raise JournalError(
                f"{self.path} holds no event{torn}: the run died while it started, or is starting "
                f"just now"
            )

    def _events(self, file: BinaryIO) -> Iterator[Event]:
        lines = iter(functools.partial(file.readline, LONGEST_LINE_BYTES), b"")
        for number, text in enumerate(lines, start=1):
            event = parse_event(text)
            if event is None:
                is_last = not text.endswith(b"\n") and len(text) < LONGEST_LINE_BYTES
                if is_last:
                    self.torn = text
                elif text != b"\n":
                    self.num_damaged += 1
                    self.first_damaged = self.first_damaged or number
                continue
            if self._attempt is not None and event.attempt > self._attempt:
                return
            if event.kind in OPENING_EVENT_KINDS:
                run = event.facts.get("run")
                self.run = run if isinstance(run, str) else self.run
            yield event


def journal_path(path: StrPath) -> Path:
    """Return the path of the journal in a run's folder, or of the journal file itself."""
    found = Path(path)
    if found.is_dir():
        found /= JOURNAL_FILE_NAME
        if not found.exists():
            raise JournalError(
                f"{found.parent} has no {JOURNAL_FILE_NAME}: name the folder of a run, or move its "
                "journal back"
            )
    elif not found.exists():
        raise JournalError(f"there is no {found}: name a run's folder, or its {JOURNAL_FILE_NAME}")
    if not found.is_file():
        raise JournalError(
            f"{found} is not a file: name a run's folder, or its {JOURNAL_FILE_NAME}"
        )
    return found


def find_journal(name: str, *, root: StrPath) -> str:
    """Return the path for `read_history` from a path, or from the name of a run in `root`.

    Both may have a suffix such as `@2` for an attempt.
    """
    path, at, attempt = name.rpartition("@")
    has_suffix = at and attempt.isdecimal()
    if not has_suffix or Path(name).exists() or (Path(root) / name).exists():
        path = name
        suffix = ""
    else:
        suffix = f"@{attempt}"

    inside = Path(root) / path
    if Path(path).exists():
        return f"{path}{suffix}"
    if inside.exists():
        return f"{inside}{suffix}"

    # Suggest the runs beside the missing one.
    folder = Path(path).parent
    if not (folder.name and folder.is_dir()):
        folder = inside.parent
    runs = [found.parent.name for found in folder.glob(f"*/{JOURNAL_FILE_NAME}")]
    if not runs:
        raise JournalError(
            f"there is no run {path}; no folder in {folder} has a {JOURNAL_FILE_NAME}"
        )
    raise JournalError(
        f"there is no run {path}; {describe_existing_runs(inside.name, runs, root=folder)}"
    )


# Open and lock the file of a journal for one writer.

EVENT_LINE_START = b'{"v":'


def open_journal(path: Path) -> int:
    """Open and lock the journal of a run for appending.

    Raises LockedRun if another process is writing it.
    """
    try:
        handle = open_here(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise JournalError(f"{path} can't be written: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise JournalError(f"{path} is not a regular file: move it away")
        if why := lock_here(handle, alone=True):
            logger.warning("%s has no lock (%s): make sure that only one process writes", path, why)
    except BlockingIOError:
        close_here(handle)
        raise LockedRun(
            f"{path} is being written by {_writer(path)}: end it, or pass rank= if this "
            f"is another rank of the same run"
        ) from None
    except BaseException:
        close_here(handle)
        raise
    return handle


def _writer(path: Path) -> str:
    pids: list[Any] = []
    with contextlib.suppress(JournalError):
        pids += [event.facts["pid"] for event in JournalReading(path) if "pid" in event.facts]
    return f"process {pids[-1]!r:.20}, or a child of it" if pids else "another process"


def last_event(path: Path) -> Event | None:
    """Return the last event; raise JournalError if the file holds something else."""
    reading = JournalReading(path)
    try:
        return collections.deque(reading, maxlen=1).pop()
    except JournalError:
        start = reading.torn[: len(EVENT_LINE_START)]
        if reading.num_damaged or not EVENT_LINE_START.startswith(start):
            raise JournalError(
                f"{path} is not a journal of a run, and was not changed: move it away"
            ) from None
    return None


# Write the journal of a run, `journal.jsonl`, with one event per line.

# Events that are synced to the disk, so that they survive a loss of power.
SYNCED_EVENT_KINDS = {"start", "resume", "rollback", "save", "stop"}


class Journal:
    """The journal of a run's folder, open for writing by rank 0; other ranks write nothing.

    The name of the run is that of the folder. The kernel's lock on the file
    refuses a second process. A file system without locks gets a warning instead; lines can't mix on
    a local disk even then, since each is a single append.
    """

    def __init__(
        self,
        folder: StrPath,
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(folder) / JOURNAL_FILE_NAME
        self.run = Path(folder).resolve().name
        self.writes = rank == 0
        self._clock = clock
        self._handle: int | None = None
        self._last: Event | None = None
        # Whether the last line has no newline: its writer died.
        self._torn = False
        if self.writes:
            self._open()
        self.attempt = self._last.attempt if self._last else 0
        self._begun = False
        # Whether the last event could not be written.
        self._is_losing = False
        keep_from_children(self)

    def _open(self) -> None:
        handle = open_journal(self.path)
        try:
            if size := os.fstat(handle).st_size:
                self._last = last_event(self.path)
                self._torn = os.pread(handle, 1, size - 1) != b"\n"
        except BaseException:
            close_here(handle)
            raise
        self._handle = handle

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def empty(self) -> bool:
        """Return whether the journal has no attempt yet, so that `start` may be called."""
        return self.attempt == 0

    def start(self, *, facts: Mapping[str, Any] | None = None) -> None:
        """Begin the run; `facts` are the result of `run_facts`."""
        if not self.empty:
            raise JournalError(
                f"{self.path} has events already: give a new run its own folder, or call resume(0)"
            )
        self._begin("start", 0, {"pid": os.getpid(), **(facts or {})})

    def resume(
        self,
        step: int,
        *,
        facts: Mapping[str, Any] | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """Continue the run from the state of a step."""
        origin: dict[str, Any] = {"pid": os.getpid()}
        if checkpoint is not None:
            origin["checkpoint"] = checkpoint
        self._begin("resume", step, origin | dict(facts or {}))
        if self._last and step > self._last.step:
            missing = f"steps {self._last.step + 1} to {step} are not in this journal"
            self.write("warning", step=step, reason=missing)

    def rollback(self, step: int, *, from_step: int, reason: str, **facts: Any) -> None:
        """Record that the run went back from `from_step` to its state at `step`."""
        self._check_begun("rollback")
        self._begin("rollback", step, {"from_step": from_step, "reason": reason, **facts})

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        **figures: Any,
    ) -> None:
        """Record one optimizer step and its figures, such as `grad_norm` and `seconds`."""
        self.write("step", step=step, loss=loss, learning_rate=learning_rate, **figures)

    def write(self, kind: str, *, step: int, **facts: Any) -> None:
        """Write any other event.

        An eval has `metric` and `value`; a spike, skip, warning or stop has `reason`.
        """
        if kind in OPENING_EVENT_KINDS:
            raise ValueError(f"an event {kind!r} opens an attempt: call the method {kind}()")
        if kind not in EVENT_KINDS:
            raise ValueError(f"there is no event {kind!r}: take one of {', '.join(EVENT_KINDS)}")
        self._check_begun(kind)
        self._write(kind, step, facts)

    def close(self) -> None:
        """Close the file. Write the event `stop` with its reason before this call."""
        if self._handle is not None:
            close_here(self._handle)
            self._handle = None

    def leave_behind(self) -> None:
        """Give up the journal in a forked child, because the parent owns it."""
        self._handle = None

    def _check_begun(self, kind: str) -> None:
        if self.writes and not self._begun:
            raise JournalError(
                f"{self.path}: {kind} before the run began: call start or resume first"
            )

    def _begin(self, kind: str, step: int, facts: dict[str, Any]) -> None:
        self._write(kind, step, facts)
        self._begun = True

    def _write(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        if type(step) is not int or step < 0:
            raise ValueError(f"a step is a whole number from 0, got {step!r}")
        if self._handle is None:
            raise JournalError(f"{self.path} is closed: {kind} of step {step} can't be written")
        attempt = self.attempt + (kind in OPENING_EVENT_KINDS)
        run = self.run if kind in OPENING_EVENT_KINDS else None
        line = encode_event(kind, facts, time=self._clock(), step=step, attempt=attempt, run=run)
        self.attempt = attempt

        if self._append(self._handle, line) and kind in SYNCED_EVENT_KINDS:
            self._force(self._handle)

    def _append(self, handle: int, line: bytes) -> bool:
        """Write the line with one call, so that lines of other writers can't mix with it.

        After a torn line, begin on a new line. Returns whether the whole line was written.
        """
        line = b"\n" + line if self._torn else line
        try:
            written = os.write(handle, line)
            self._torn = written < len(line)
            why = os.strerror(errno.ENOSPC) if self._torn else ""
        except OSError as error:
            why = error.strerror or str(error)
        if why and not self._is_losing:
            logger.warning("%s: %s; training goes on without its journal", self.path, why)
        self._is_losing = bool(why)
        return not why

    def _force(self, handle: int) -> None:
        try:
            os.fsync(handle)
        except OSError as error:
            logger.warning("%s may not outlive a loss of power: %s", self.path, error.strerror)
