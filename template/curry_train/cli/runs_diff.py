"""Command `runs diff`: compare two runs by their journals.

Everything that a journal records of a run, except its steps, is flattened to names and values, and
those that differ are the rows of one table. Losses and metrics are compared step by step.

Proof: `python -m pytest tests/cli/test_runs_diff.py`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import click
import numpy

from ..core.wording import format_bytes, format_seconds, write_json
from ..runs.history import Attempt, History, Steps, read_history
from ..runs.journal import finite, printable
from .options import json_option
from .screen import ScreenCommand, fill_screen, table

SECTIONS = ("config", "code", "environment")
CODE_FACTS = ("revision", "dirty", "changes", "why")
# Stands for the value of a key that only the other run has.
ABSENT_VALUE = "(none)"


@dataclass(frozen=True)
class Change:
    """One differing setting or fact: its dotted name, and both values as JSON values."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class StepDifference:
    """A step at which the values of both runs differ."""

    step: int
    a: float
    b: float

    def __str__(self) -> str:
        return f"at step {self.step}: A {self.a:.9g}, B {self.b:.9g}, by {self.b - self.a:+.3g}"


@dataclass(frozen=True)
class Comparison:
    """Comparison of losses, or of another metric, at the steps that both runs have."""

    num_common: int
    num_different: int = 0
    first_common: int | None = None
    last_common: int | None = None
    first: StepDifference | None = None
    # The step with the largest absolute difference.
    largest: StepDifference | None = None

    def lines(self, name: str) -> Iterator[str]:
        if not self.num_common:
            yield f"{name}: no step in common"
            return
        steps = f"common steps, {self.first_common} to {self.last_common}"
        if self.first is None:
            yield f"{name}: equal to the bit in {self.num_common} {steps}"
            return
        yield f"{name}: {self.num_different} of {self.num_common} {steps}, differ"
        yield f"  first {self.first}"
        if self.largest != self.first:
            yield f"  most {self.largest}"


@dataclass(frozen=True)
class RunDifference:
    """The whole comparison of two runs, A and B."""

    # Which run continues the other one, and from which step; None if neither does.
    continued: str | None
    changes: list[Change]
    # Sections that a journal does not record, so that they are not compared.
    unknown: list[str]
    losses: Comparison
    metrics: dict[str, Comparison]

    def text(self) -> str:
        """Return the comparison at most 80 columns wide."""
        sections = {name.split()[0] for name in self.unknown}
        sections |= {change.name.split(".")[0] for change in self.changes}
        same = [name for name in SECTIONS if name not in sections]
        rows = [["", "A", "B"]]
        for change in self.changes:
            rows.append([printable(change.name), _value(change.a), _value(change.b)])
        lines: list[Any] = [
            self.continued,
            self.changes and table(rows, texts=("A", "B")),
            same and f"the same: {', '.join(same)}",
            self.unknown and f"not recorded: {', '.join(self.unknown)}",
            *self.losses.lines("losses"),
        ]
        for name, compared in self.metrics.items():
            lines += compared.lines(printable(name, longest=30))
        return "\n".join(
            line if "\n" in line else fill_screen(line) for line in map(str, filter(None, lines))
        )


def difference(a: History, b: History) -> RunDifference:
    """Compare two runs; steps that were rolled back are left out."""
    runs = (a, b)
    unknown = {
        f"{section} of {run.name}": section
        for run in runs
        for section in SECTIONS
        if not _is_recorded(section, run.facts)
    }
    facts = [{key: run.facts.get(key) for key in SECTIONS} for run in runs]
    for fact, run in zip(facts, runs, strict=True):
        code = fact["code"] or {}
        fact["code"] = {key: code[key] for key in CODE_FACTS if key in code}
        for section in unknown.values():
            fact[section] = None
        fact["command"] = run.facts.get("command")
    return RunDifference(
        continued=continuation(a, b) or continuation(b, a),
        changes=changes(*(summary(run) | fact for run, fact in zip(runs, facts, strict=True))),
        unknown=list(unknown),
        losses=compare_values(a.steps, b.steps, "loss"),
        metrics={
            name: compare_values(a.metrics[name].steps, b.metrics[name].steps, "value")
            for name in sorted(a.metrics.keys() & b.metrics.keys())
        },
    )


def _is_recorded(section: str, facts: Mapping[str, Any]) -> bool:
    """Check for a section; code without a revision may be any code."""
    recorded = facts.get(section)
    if not isinstance(recorded, Mapping):
        return False
    return section != "code" or isinstance(recorded.get("revision"), str)


def summary(run: History) -> dict[str, Any]:
    """Return what a journal shows of a run besides its facts, its losses and its metrics."""
    steps = run.steps
    last = run.attempts[-1] if run.attempts else None
    peaks = [int(size) for size in steps.values["peak_bytes"] if size > 0]
    seconds = [value for value in steps.values["seconds"] if value > 0]
    return {
        "run": run.name,
        "steps": f"{steps.step[0]} to {steps.step[-1]}" if steps else "none",
        "attempts": len(run.attempts),
        "ended by": (last and last.ended) or "no record",
        "damaged lines": run.num_damaged,
        "peak memory": format_bytes(max(peaks)) if peaks else None,
        "median step": format_seconds(median(seconds)) if seconds else None,
        "events": {kind: len(events) for kind, events in sorted(run.events.items())},
    }


def continuation(earlier: History, later: History) -> str | None:
    """Describe how `later` continues `earlier`, which may be the same journal, or return None."""
    if not earlier.attempts or not earlier.steps:
        return None
    known = [_opening(attempt) for attempt in earlier.attempts]
    # The same journal up to another attempt, or a copy that was continued.
    is_same = [_opening(attempt) for attempt in later.attempts[: len(known)]] == known
    opened = later.attempts[len(known) :] if is_same else []
    if not opened or opened[0].step > earlier.steps.step[-1]:
        return None
    step = opened[0].step
    if opened[0].kind == "rollback":
        return f"{later.name} rolled {earlier.name} back to step {step}"
    return f"{later.name} resumed from {earlier.name} at step {step}"


def _opening(attempt: Attempt) -> tuple[float, str, int]:
    return attempt.time, attempt.kind, attempt.step


def changes(a: Any, b: Any, *, name: str = "") -> list[Change]:
    """List the differing leaves; a mapping that only one side has counts as one leaf."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: list[Change] = []
        for key in dict.fromkeys([*a, *b]):
            inner = f"{name}.{key}" if name else str(key)
            found += changes(a.get(key, ABSENT_VALUE), b.get(key, ABSENT_VALUE), name=inner)
        return found
    # 1 differs from true, and equals 1.0.
    is_equal = isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
    return [] if is_equal else [Change(name, a, b)]


def compare_values(a: Steps, b: Steps, name: str) -> Comparison:
    """Compare the values at the steps that both have; nan on both sides counts as equal."""
    common, places_a, places_b = numpy.intersect1d(
        a.step, b.step, assume_unique=True, return_indices=True
    )
    if not len(common):
        return Comparison(0)
    values_a = numpy.asarray(a.values[name])[places_a]
    values_b = numpy.asarray(b.values[name])[places_b]
    both_nan = numpy.isnan(values_a) & numpy.isnan(values_b)
    found = [
        StepDifference(int(common[place]), float(values_a[place]), float(values_b[place]))
        for place in numpy.flatnonzero((values_a != values_b) & ~both_nan)
    ]

    def amount(one: StepDifference) -> float:
        size = abs(one.b - one.a)
        return math.inf if math.isnan(size) else size

    return Comparison(
        num_common=len(common),
        num_different=len(found),
        first_common=int(common[0]),
        last_common=int(common[-1]),
        first=found[0] if found else None,
        largest=max(found, key=amount, default=None),
    )


def _value(value: Any) -> str:
    return printable(value if isinstance(value, str) and value else json.dumps(value))


@click.command("diff", cls=ScreenCommand, example="run-001 run-002")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@json_option()
def runs_diff_command(a: str, b: str, json_path: str | None) -> None:
    """Compare two runs by their journals.

    Prints what differs in configuration, code, environment, events and costs, and the first step
    with another loss.

    A run is a name in runs/, a folder or a journal; NAME@2 is the run as its second attempt left
    it. Exit status: 0 compared, 2 a run can't be read.
    """
    found = difference(*(read_history(name, root="runs") for name in (a, b)))
    click.echo(found.text())
    if json_path:
        write_json(json_path, finite({"a": a, "b": b} | asdict(found)))
