"""A run's journal as it is on the disk: one event per line, read as a stream, whatever happened to the file.

    reading = JournalReading("runs/run-001")
    for event in reading:
        print(event.step, event.kind, event.facts)
    print(reading.num_damaged, reading.torn)

A line that is no event is counted with its number, and the rest is read. Only a newer version and a second run in the
same file end the reading. Nothing here imports torch. Proof: `python -m pytest tests/test_journal_reading.py`.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .journal_lines import (
    LONGEST,
    OPENING,
    Event,
    JournalError,
    NewerJournal,
    parse_event,
    printable,
)
from .names import what_runs_there_are

NAME = "journal.jsonl"
MOST_KEPT = 100  # damaged lines that are described; the others are counted
HEAD = 100  # lines without an event, after which a file is no journal


class DamagedLine(NamedTuple):
    """A line that is no event, and why."""

    line: int
    why: str


class JournalReading:
    """Iterate over it for the events. What else was found is known when the iteration ended.

    `torn` holds the last line where it is not whole: its writer died, or is writing. `attempt` is the last to read.
    """

    def __init__(self, path: str | os.PathLike[str], *, attempt: int | None = None) -> None:
        self.path = journal_path(path)
        self.run: str | None = None
        self.num_events = 0
        self.num_damaged = 0
        self.damaged: list[DamagedLine] = []
        self.torn = b""
        self._attempt = attempt

    def __iter__(self) -> Iterator[Event]:
        self.run, self.num_events, self.num_damaged, self.damaged, self.torn = None, 0, 0, [], b""
        try:
            with self.path.open("rb") as file:
                yield from self._events(file)
        except OSError as error:
            raise JournalError(f"{self.path} can't be read: {error.strerror}") from error
        if not self.num_events and self.num_damaged:
            raise self._no_journal()
        if not self.num_events:
            raise JournalError(
                f"{self.path} holds no event{' but a torn one' if self.torn else ''}: the run died as it began, or "
                "begins just now"
            )

    def _events(self, file: BinaryIO) -> Iterator[Event]:
        number = 0
        for text in iter(functools.partial(file.readline, LONGEST + 1), b""):
            number += 1
            if len(text) > LONGEST:
                while text and not text.endswith(b"\n"):
                    text = file.readline(LONGEST)
                found: Event | str = f"longer than {LONGEST} bytes"
            elif text == b"\n":
                continue
            else:
                try:
                    found = parse_event(text, line=number)
                except NewerJournal as error:
                    raise NewerJournal(f"{self.path}: {error}") from None
                if isinstance(found, str) and not text.endswith(b"\n"):
                    self.torn = text
                    return
            if isinstance(found, str):
                self._damage(DamagedLine(number, found))
                continue
            if self._attempt is not None and found.attempt > self._attempt:
                return
            if found.kind in OPENING:
                self._name(found)
            self.num_events += 1
            yield found

    def _damage(self, damaged: DamagedLine) -> None:
        self.num_damaged += 1
        if len(self.damaged) < MOST_KEPT:
            self.damaged.append(damaged)
        if not self.num_events and self.num_damaged >= HEAD:
            raise self._no_journal()

    def _name(self, event: Event) -> None:
        run = event.facts.get("run")
        if not isinstance(run, str):
            return
        if self.run is not None and run != self.run:
            raise JournalError(
                f"{self.path}: line {event.line} begins {printable(run)} in the journal of {printable(self.run)}, so "
                "two files were joined: take them apart there"
            )
        self.run = run

    def _no_journal(self) -> JournalError:
        first = self.damaged[0]
        return JournalError(f"{self.path} is no journal of a run: line {first.line} is {first.why}")


def journal_path(path: str | os.PathLike[str]) -> Path:
    """The journal in a run's folder, or the file itself."""
    found = Path(path)
    if found.is_dir():
        found /= NAME
        if not found.exists():
            raise JournalError(
                f"{found.parent} has no {NAME}: it is no folder of a run, or its journal was moved"
            )
    elif not found.exists():
        raise JournalError(f"there is no {found}: name a run's folder, or its {NAME}")
    if not found.is_file():
        raise JournalError(f"{found} is no file: name a run's folder, or its {NAME}")
    return found


def find_journal(name: str, *, root: str | os.PathLike[str]) -> str:
    """What `read_history` takes for what a person types: a path, or the name of a run in `root`; both may end in @2."""
    path, at, attempt = name.rpartition("@")
    if not (at and attempt.isdecimal()) or Path(name).exists() or (Path(root) / name).exists():
        path, at, attempt = name, "", ""
    inside = Path(root) / path
    if Path(path).exists() or inside.exists():
        return f"{path if Path(path).exists() else inside}{at}{attempt}"
    beside = (
        Path(path).parent
        if Path(path).parent.name and Path(path).parent.is_dir()
        else inside.parent
    )
    there = [found.parent.name for found in beside.glob(f"*/{NAME}")]
    known = what_runs_there_are(inside.name, there, root=beside)
    raise JournalError(
        f"there is no run {path}; {known if there else f'no folder in {beside} has a {NAME}'}"
    )
