"""Stream the events of a journal from the disk, even if the file is damaged.

    reading = JournalReading("runs/run-001")
    for event in reading:
        print(event.step, event.kind, event.facts)
    print(reading.num_damaged, reading.torn)

A line that is not an event is recorded with its number, and reading continues. Only a line of a
newer version or of a second run in the same file stops it. This module does not import torch.
Proof: `python -m pytest tests/test_journal_reading.py`.
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
# Number of damaged lines that are described; later ones are only counted.
MOST_KEPT = 100
# A file without any event in this many lines is not a journal.
HEAD = 100


class DamagedLine(NamedTuple):
    """A line that is not an event, and why."""

    line: int
    why: str


class JournalReading:
    """An iterable over the events of a journal; its other attributes are complete afterwards.

    `torn` holds an incomplete last line: its writer died, or is still writing it. `attempt` is the
    last attempt to read.
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
        self.run = None
        self.num_events = 0
        self.num_damaged = 0
        self.damaged = []
        self.torn = b""
        try:
            with self.path.open("rb") as file:
                yield from self._events(file)
        except OSError as error:
            raise JournalError(f"{self.path} can't be read: {error.strerror}") from error
        if not self.num_events and self.num_damaged:
            raise self._no_journal()
        if not self.num_events:
            torn = " except a torn one" if self.torn else ""
            raise JournalError(
                f"{self.path} holds no event{torn}: the run died while it started, or is starting "
                f"just now"
            )

    def _events(self, file: BinaryIO) -> Iterator[Event]:
        lines = iter(functools.partial(file.readline, LONGEST + 1), b"")
        for number, text in enumerate(lines, start=1):
            if text == b"\n":
                continue
            if len(text) > LONGEST:
                _skip_rest_of_line(file, text)
                self._damage(DamagedLine(number, f"longer than {LONGEST} bytes"))
                continue

            try:
                found = parse_event(text, line=number)
            except NewerJournal as error:
                raise NewerJournal(f"{self.path}: {error}") from None
            if isinstance(found, str):
                if not text.endswith(b"\n"):
                    self.torn = text
                    return
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
                f"{self.path}: line {event.line} begins the run {printable(run)} in the journal of "
                f"{printable(self.run)}, so two files were joined: split the file before that line"
            )
        self.run = run

    def _no_journal(self) -> JournalError:
        first = self.damaged[0]
        return JournalError(
            f"{self.path} is not a journal of a run: line {first.line} is {first.why}"
        )


def _skip_rest_of_line(file: BinaryIO, text: bytes) -> None:
    while text and not text.endswith(b"\n"):
        text = file.readline(LONGEST)


def journal_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the journal in a run's folder, or of the journal file itself."""
    found = Path(path)
    if found.is_dir():
        found /= NAME
        if not found.exists():
            raise JournalError(
                f"{found.parent} has no {NAME}: name the folder of a run, or move its journal back"
            )
    elif not found.exists():
        raise JournalError(f"there is no {found}: name a run's folder, or its {NAME}")
    if not found.is_file():
        raise JournalError(f"{found} is not a file: name a run's folder, or its {NAME}")
    return found


def find_journal(name: str, *, root: str | os.PathLike[str]) -> str:
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
    runs = [found.parent.name for found in folder.glob(f"*/{NAME}")]
    if not runs:
        raise JournalError(f"there is no run {path}; no folder in {folder} has a {NAME}")
    raise JournalError(
        f"there is no run {path}; {what_runs_there_are(inside.name, runs, root=folder)}"
    )
