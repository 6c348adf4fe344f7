"""What a journal tells of a run: its attempts, what became of each, and the history that counts in the end.

    history = read_history("runs/run-001")            # "runs/run-001@2" is the run as attempt 2 left it
    print(history.steps.step[-1], history.steps.values["loss"][-1], [attempt.number for attempt in history.attempts])

Where an attempt begins at a step, what earlier attempts did after it counts no more: it is in `superseded`. Figures are
kept in arrays, so that a million steps take some 70 MB. Proof: `python -m pytest tests/test_journal_history.py`.
"""

import os
import re
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .journal_lines import OPENING, Event, number_of
from .journal_reading import JournalReading

FIGURES = ("loss", "learning_rate", "grad_norm", "terms", "seconds", "peak_bytes")
MOST_KEPT = 1000  # events of a kind; the first ones
FACTS = ("config", "code", "environment", "command")
_ATTEMPT = re.compile(r"(?P<path>.+)@(?P<attempt>[1-9]\d{0,14})")


class Steps:
    """Figures of steps, each in an array; steps go up. What a journal does not tell is nan."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.step = array("q")
        self.attempt = array("q")
        self.values = {name: array("d") for name in names}

    def __len__(self) -> int:
        return len(self.step)

    def add(self, event: Event, figures: dict[str, Any]) -> None:
        self.step.append(event.step)
        self.attempt.append(event.attempt)
        for name, values in self.values.items():
            value = figures.get(name)
            values.append(value if type(value) is float else number_of(value))

    def cut(self, index: int) -> "Steps":
        """What was there from `index` on, which this one has no more."""
        taken = Steps(tuple(self.values))
        taken.step, taken.attempt = self.step[index:], self.attempt[index:]
        del self.step[index:], self.attempt[index:]
        for name, values in self.values.items():
            taken.values[name] = values[index:]
            del values[index:]
        return taken


@dataclass
class Course:
    """Steps that count, and those that do not any more, in the order in which they were given up."""

    steps: Steps
    superseded: list[Steps] = field(default_factory=list)

    def add(self, event: Event, figures: dict[str, Any]) -> None:
        if len(self.steps) and event.step <= self.steps.step[-1]:
            self.keep_up_to(event.step - 1)
        self.steps.add(event, figures)

    def keep_up_to(self, step: int) -> None:
        index = bisect_right(self.steps.step, step)
        if index < len(self.steps):
            self.superseded.append(self.steps.cut(index))


@dataclass
class Attempt:
    """One go at a run: how it began and ended. `ended` is None where no word of it is: killed, or running."""

    number: int
    kind: str
    step: int
    time: float
    run: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    last_step: int = 0
    num_steps: int = 0
    ended: str | None = None

    @property
    def from_run(self) -> str | None:
        """The other run whose state this attempt began with."""
        told = self.facts.get("from_run")
        return told if isinstance(told, str) else None


@dataclass
class Marks:
    """Events of a kind: where all of them are, and the first ones whole."""

    step: "array[int]" = field(default_factory=lambda: array("q"))
    attempt: "array[int]" = field(default_factory=lambda: array("q"))
    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        self.step.append(event.step)
        self.attempt.append(event.attempt)
        if len(self.events) < MOST_KEPT:
            self.events.append(event)


@dataclass
class History:
    """A whole journal. `name` is what the reader called it, `run` what it calls itself."""

    name: str
    path: Path
    course: Course = field(default_factory=lambda: Course(Steps(FIGURES)))
    metrics: dict[str, Course] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    marks: dict[str, Marks] = field(default_factory=dict)
    run: str | None = None
    num_events: int = 0
    num_damaged: int = 0
    first_damaged: int | None = None
    torn: bool = False

    @property
    def steps(self) -> Steps:
        return self.course.steps

    @property
    def facts(self) -> dict[str, Any]:
        """Configuration, code and environment as the newest attempt told them."""
        found: dict[str, Any] = {}
        for attempt in self.attempts:
            found |= {key: attempt.facts[key] for key in FACTS if key in attempt.facts}
        return found

    @property
    def last_step(self) -> int:
        return self.attempts[-1].last_step if self.attempts else 0

    def add(self, event: Event) -> None:
        self.num_events += 1
        if event.kind in OPENING or not self.attempts or event.attempt > self.attempts[-1].number:
            self._open(event)
        attempt = self.attempts[-1]
        attempt.last_step = max(attempt.last_step, event.step)
        if event.kind == "step":
            attempt.num_steps += 1
            self.course.add(event, event.facts)
            return
        if event.kind == "eval" and isinstance(metric := event.facts.get("metric"), str):
            self.metrics.setdefault(metric, Course(Steps(("value",)))).add(event, event.facts)
        elif event.kind == "stop":
            attempt.ended = str(event.facts.get("reason", "without a reason"))
        self.marks.setdefault(event.kind, Marks()).add(event)

    def _open(self, event: Event) -> None:
        """Also where the event that opened it is lost: the journal goes on with a higher attempt then."""
        opens = event.kind in OPENING
        step = event.step if opens else max(0, event.step - 1)
        facts = event.facts if opens else {}
        run = facts.get("run")
        known = run if isinstance(run, str) else self.run
        self.attempts.append(
            Attempt(
                event.attempt,
                event.kind if opens else "lost",
                step,
                event.time,
                known,
                facts,
                last_step=step,
            )
        )
        for course in (self.course, *self.metrics.values()):
            course.keep_up_to(step)


def read_history(path: str | os.PathLike[str], *, name: str | None = None) -> History:
    """Read a run's folder or its journal, up to an attempt where the path ends with `@` and its number."""
    given, attempt = os.fspath(path), None
    if (found := _ATTEMPT.fullmatch(given)) and not Path(given).exists():
        given, attempt = found["path"], int(found["attempt"])
    reading = JournalReading(given, attempt=attempt)
    history = History(name or os.fspath(path), reading.path)
    for event in reading:
        history.add(event)
    if attempt is not None and history.attempts[-1].number < attempt:
        raise ValueError(
            f"{reading.path} has {history.attempts[-1].number} attempts, and no {attempt}"
        )
    history.run, history.num_damaged, history.torn = (
        reading.run,
        reading.num_damaged,
        bool(reading.torn),
    )
    history.first_damaged = reading.damaged[0].line if reading.damaged else None
    return history
