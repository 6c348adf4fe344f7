"""Compare two runs by their journals: configuration, code, losses, costs and events.

    found = difference(read_history("runs/run-001"), read_history("runs/run-002"))
    print(found.losses.parted)

Losses are compared bit for bit, because the step at which a difference begins matters, however
small it is. This module reads and writes no files.
Proof: `python -m pytest tests/test_diff.py`.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from .journal_history import Attempt, History, Marks

# Smallest relative difference of the loss that is visible in a plot.
VISIBLE = 0.01
# Stands for the value of a key that only the other run has.
ABSENT = "(none)"
# Number of steps that are listed for each kind of event.
MOST_STEPS = 20
CODE = ("revision", "dirty", "changes", "why")


@dataclass(frozen=True)
class Change:
    """One differing setting or fact: its dotted name, and both values as JSON values."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Resumed:
    """How `later` continues from the state of `earlier` at `step`; `how` is resume or rollback."""

    earlier: str
    later: str
    step: int
    how: str = "resume"
    # Whether the journal of `earlier` reaches that step.
    reached: bool = True


@dataclass(frozen=True)
class Parting:
    """A step at which the losses differ; `relative` is the absolute amount divided by A's loss."""

    step: int
    a: float
    b: float

    @property
    def amount(self) -> float:
        return self.b - self.a

    @property
    def relative(self) -> float:
        if math.isfinite(self.amount) and self.a:
            return abs(self.amount / self.a)
        return math.inf


@dataclass(frozen=True)
class Losses:
    """Comparison of the losses, or of another metric, at the steps that both runs have."""

    num_common: int
    num_different: int = 0
    first_common: int | None = None
    last_common: int | None = None
    # The first step with different values.
    parted: Parting | None = None
    # The first step whose values differ by more than 1%.
    visibly: Parting | None = None
    # The step with the largest absolute difference.
    largest: Parting | None = None
    # The first and the last step of each run.
    spans: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)


@dataclass(frozen=True)
class Seen:
    """Events of one kind in one journal: their number, and the steps of the first ones."""

    num: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """The whole comparison of two runs, A and B."""

    a: str
    b: str
    # Whether both names mean the same journal, which therefore cannot differ.
    same: bool
    resumed: Resumed | None
    config: list[Change]
    code: list[Change]
    environment: list[Change]
    losses: Losses
    # The highest peak and the median seconds of a step, of A and of B.
    costs: dict[str, tuple[float, float]] = field(default_factory=dict)
    metrics: dict[str, Losses] = field(default_factory=dict)
    # The events of A and of B, by kind.
    events: dict[str, tuple[Seen, Seen]] = field(default_factory=dict)
    # Whether the journals of A and of B record the configuration, the code and the environment.
    told: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        for name, losses in ((None, self.losses), *self.metrics.items()):
            target = found["losses"] if name is None else found["metrics"][name]
            for key in ("parted", "visibly", "largest"):
                parting: Parting | None = getattr(losses, key)
                if parting is not None:
                    target[key] |= {"amount": parting.amount, "relative": parting.relative}
        return found


def difference(a: History, b: History) -> Difference:
    """Compare two runs; steps that were rolled back are left out."""
    facts_a = a.facts
    facts_b = b.facts
    changed: dict[str, list[Change]] = {}
    recorded: dict[str, tuple[bool, bool]] = {}
    for section in ("config", "code", "environment"):
        changed[section] = changes(facts_a.get(section), facts_b.get(section))
        recorded[section] = (_known(section, facts_a), _known(section, facts_b))
    changed["code"] = [change for change in changed["code"] if change.name.split(".")[0] in CODE]
    command = changes({"command": facts_a.get("command")}, {"command": facts_b.get("command")})

    kinds = {*a.marks, *b.marks} - {"start"}
    return Difference(
        a.name,
        b.name,
        same=a.path.resolve() == b.path.resolve() and len(a.attempts) == len(b.attempts),
        resumed=resumed(a, b),
        config=changed["config"],
        code=changed["code"],
        environment=command + changed["environment"],
        losses=compare(a.steps.step, a.steps.values["loss"], b.steps.step, b.steps.values["loss"]),
        costs=_costs(a, b),
        metrics=_metrics(a, b),
        events={kind: (_seen(a, kind), _seen(b, kind)) for kind in sorted(kinds)},
        told=recorded,
    )


def resumed(a: History, b: History) -> Resumed | None:
    """Return how B continues from A or A from B, or None.

    A and B may also be the same journal, read up to different attempts.
    """
    for earlier, later in ((a, b), (b, a)):
        if opening := _went_on(earlier, later):
            how = "rollback" if opening.kind == "rollback" else "resume"
            steps = earlier.steps.step
            reached = opening.step == 0 or (len(steps) > 0 and opening.step <= steps[-1])
            return Resumed(earlier.name, later.name, opening.step, how, reached)
    return None


def _went_on(earlier: History, later: History) -> Attempt | None:
    """Return the attempt of `later` that began from a state of `earlier`, or None."""
    if not earlier.attempts or not later.attempts:
        return None

    earlier_runs = {attempt.run for attempt in earlier.attempts} | {earlier.path.parent.name}
    later_runs = {attempt.run for attempt in later.attempts}
    for attempt in later.attempts:
        if (
            attempt.from_run is not None
            and attempt.from_run in earlier_runs
            and attempt.from_run not in later_runs
        ):
            return attempt

    # The same journal, or a copy that was continued, begins with all attempts of `earlier`.
    num_shared = len(earlier.attempts)
    earlier_openings = [_opening(attempt) for attempt in earlier.attempts]
    later_openings = [_opening(attempt) for attempt in later.attempts[: num_shared + 1]]
    if later_openings[:-1] == earlier_openings:
        return later.attempts[num_shared]
    return None


def _opening(attempt: Attempt) -> tuple[str | None, float, str, int]:
    return attempt.run, attempt.time, attempt.kind, attempt.step


def changes(a: Any, b: Any, *, name: str = "") -> list[Change]:
    """List the differing leaves; a mapping that only one side has counts as one leaf."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: list[Change] = []
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{name}.{key}" if name else str(key)
            found += changes(a.get(key, ABSENT), b.get(key, ABSENT), name=inner)
        return found
    return [] if _equal(a, b) or not name else [Change(name, a, b)]


def _equal(a: Any, b: Any) -> bool:
    """Compare JSON values: 1 differs from true, and equals 1.0."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def compare(
    steps_a: "array[int]", a: "array[float]", steps_b: "array[int]", b: "array[float]"
) -> Losses:
    """Compare the values at the steps that both have; nan on both sides counts as equal.

    The steps are in ascending order, so that one pass finds the common ones.
    """
    num_common = 0
    num_different = 0
    first = None
    last = None
    parted = None
    visibly = None
    largest = None
    i = 0
    j = 0
    while i < len(steps_a) and j < len(steps_b):
        step = steps_a[i]
        if step < steps_b[j]:
            i += 1
            continue
        if step > steps_b[j]:
            j += 1
            continue

        value_a = a[i]
        value_b = b[j]
        i += 1
        j += 1
        num_common += 1
        first = step if first is None else first
        last = step
        if value_a == value_b or (math.isnan(value_a) and math.isnan(value_b)):
            continue

        num_different += 1
        difference_here = Parting(step, value_a, value_b)
        parted = parted or difference_here
        if visibly is None and difference_here.relative > VISIBLE:
            visibly = difference_here
        if largest is None or _size(difference_here) > _size(largest):
            largest = difference_here

    spans = (_span(steps_a), _span(steps_b))
    return Losses(num_common, num_different, first, last, parted, visibly, largest, spans)


def _size(parting: Parting) -> float:
    """Return the absolute difference, infinite where it is nan."""
    amount = abs(parting.amount)
    return math.inf if math.isnan(amount) else amount


def _span(steps: Sequence[int]) -> tuple[int, int] | None:
    return (steps[0], steps[-1]) if len(steps) else None


def _known(section: str, facts: Mapping[str, Any]) -> bool:
    """Whether the journal records this section.

    Code without a revision counts as unknown, since two runs outside of git may run different code.
    """
    recorded = facts.get(section)
    if not isinstance(recorded, Mapping):
        return False
    return section != "code" or isinstance(recorded.get("revision"), str)


def _seen(history: History, kind: str) -> Seen:
    marks = history.marks.get(kind, Marks())
    return Seen(len(marks.step), tuple(marks.step[:MOST_STEPS]))


def _costs(a: History, b: History) -> dict[str, tuple[float, float]]:
    """Return the highest peak and the median seconds of a step, where both journals record them."""
    found = {}
    for name, summarize in (("peak_bytes", max), ("seconds", median)):
        values_a = [value for value in a.steps.values[name] if value > 0]
        values_b = [value for value in b.steps.values[name] if value > 0]
        if values_a and values_b:
            found[name] = summarize(values_a), summarize(values_b)
    return found


def _metrics(a: History, b: History) -> dict[str, Losses]:
    found = {}
    for name in sorted(a.metrics.keys() & b.metrics.keys()):
        steps_a = a.metrics[name].steps
        steps_b = b.metrics[name].steps
        found[name] = compare(
            steps_a.step, steps_a.values["value"], steps_b.step, steps_b.values["value"]
        )
    return found
