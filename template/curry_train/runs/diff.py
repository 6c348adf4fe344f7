"""What is different between two runs, from their journals: where one went on from the other, what they were made of,
and the first step at which their losses part.

    found = difference(read_history("runs/run-001"), read_history("runs/run-002"))
    print(found.losses.parted)

Losses are compared to the bit: what counts is where a difference begins, however small. Nothing here reads or writes.
Proof: `python -m pytest tests/test_diff.py`.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from .journal_history import Attempt, History, Marks

VISIBLE = 0.01  # of the loss: a difference that a curve shows
ABSENT = "(none)"  # a key that the other has not
MOST_STEPS = 20  # of a kind of event that are named
CODE = ("revision", "dirty", "changes", "why")


@dataclass(frozen=True)
class Change:
    """One thing that is not the same: a dotted name, and both values as JSON holds them."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Resumed:
    """`later` goes on from the state that `earlier` had at `step`; `how` is resume or rollback."""

    earlier: str
    later: str
    step: int
    how: str = "resume"
    reached: bool = True  # whether the earlier one's journal has that step


@dataclass(frozen=True)
class Parting:
    """A step at which losses differ; `relative` is the amount over A's loss."""

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
    """Steps that both have. `parted` is the first with another loss, `visibly` the first that is 1% off."""

    num_common: int
    num_different: int = 0
    first_common: int | None = None
    last_common: int | None = None
    parted: Parting | None = None
    visibly: Parting | None = None
    largest: Parting | None = None
    spans: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)


@dataclass(frozen=True)
class Seen:
    """Events of a kind in one journal: how many, and the steps of the first."""

    num: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """All of it. `same` says that both names are one journal, and then nothing can differ."""

    a: str
    b: str
    same: bool
    resumed: Resumed | None
    config: list[Change]
    code: list[Change]
    environment: list[Change]
    losses: Losses
    costs: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # the highest peak and the median time of a step
    metrics: dict[str, Losses] = field(default_factory=dict)
    events: dict[str, tuple[Seen, Seen]] = field(default_factory=dict)  # of each kind, A's and B's
    told: dict[str, tuple[bool, bool]] = field(
        default_factory=dict
    )  # whether the journals tell of each part

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
    """Compare the histories that count in the end; what was rolled back is not compared."""
    facts = a.facts, b.facts
    parts: dict[str, list[Change]] = {}
    for part in ("config", "code", "environment"):
        parts[part] = changes(facts[0].get(part), facts[1].get(part))
    parts["code"] = [change for change in parts["code"] if change.name.split(".")[0] in CODE]
    command = changes({"command": facts[0].get("command")}, {"command": facts[1].get("command")})
    return Difference(
        a.name,
        b.name,
        same=a.path.resolve() == b.path.resolve() and len(a.attempts) == len(b.attempts),
        resumed=resumed(a, b),
        config=parts["config"],
        code=parts["code"],
        environment=command + parts["environment"],
        losses=compare(a.steps.step, a.steps.values["loss"], b.steps.step, b.steps.values["loss"]),
        costs=_costs(a, b),
        metrics=_metrics(a, b),
        events={
            kind: (_seen(a, kind), _seen(b, kind))
            for kind in sorted({*a.marks, *b.marks} - {"start"})
        },
        told={part: (_known(part, facts[0]), _known(part, facts[1])) for part in parts},
    )


def resumed(a: History, b: History) -> Resumed | None:
    """Whether B goes on from A, or A from B; also where both are one journal, up to different attempts."""
    for earlier, later in ((a, b), (b, a)):
        if opening := _went_on(earlier, later):
            how = "rollback" if opening.kind == "rollback" else "resume"
            held = earlier.steps.step
            reached = opening.step == 0 or (len(held) > 0 and opening.step <= held[-1])
            return Resumed(earlier.name, later.name, opening.step, how, reached)
    return None


def _went_on(earlier: History, later: History) -> Attempt | None:
    if not earlier.attempts or not later.attempts:
        return None
    known = {attempt.run for attempt in earlier.attempts} | {earlier.path.parent.name}
    own = {attempt.run for attempt in later.attempts}
    for attempt in later.attempts:
        if (
            attempt.from_run is not None
            and attempt.from_run in known
            and attempt.from_run not in own
        ):
            return attempt
    shared = len(earlier.attempts)
    began = [
        (attempt.run, attempt.time, attempt.kind, attempt.step)
        for attempt in later.attempts[: shared + 1]
    ]
    if began[:-1] == [
        (attempt.run, attempt.time, attempt.kind, attempt.step) for attempt in earlier.attempts
    ]:
        return later.attempts[shared]
    return None


def changes(a: Any, b: Any, *, name: str = "") -> list[Change]:
    """Leaf by leaf; a mapping that only one of them has is told whole."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{name}.{key}" if name else str(key)
            found += changes(a.get(key, ABSENT), b.get(key, ABSENT), name=inner)
        return found
    return [] if _equal(a, b) or not name else [Change(name, a, b)]


def _equal(a: Any, b: Any) -> bool:
    """JSON's 1 is not its true, and 1 is 1.0: a file that was written by hand means the same."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def compare(
    steps_a: "array[int]", a: "array[float]", steps_b: "array[int]", b: "array[float]"
) -> Losses:
    """Both go up in steps, so one walk finds the common ones. Figures that are no number on both sides are equal."""
    spans = _span(steps_a), _span(steps_b)
    common = different = i = j = 0
    first = last = None
    parted = visibly = largest = None
    while i < len(steps_a) and j < len(steps_b):
        if steps_a[i] != steps_b[j]:
            i, j = (i + 1, j) if steps_a[i] < steps_b[j] else (i, j + 1)
            continue
        step, x, y = steps_a[i], a[i], b[j]
        i, j, common, last = i + 1, j + 1, common + 1, step
        first = step if first is None else first
        if x == y or (x != x and y != y):
            continue
        different += 1
        here = Parting(step, x, y)
        parted = parted or here
        if visibly is None and here.relative > VISIBLE:
            visibly = here
        if largest is None or _size(here) > _size(largest):
            largest = here
    return Losses(common, different, first, last, parted, visibly, largest, spans)


def _size(parting: Parting) -> float:
    amount = abs(parting.amount)
    return amount if amount == amount else math.inf


def _span(steps: Sequence[int]) -> tuple[int, int] | None:
    return (steps[0], steps[-1]) if len(steps) else None


def _known(part: str, facts: Mapping[str, Any]) -> bool:
    """Code without a revision is not known: two runs outside of git need not be the same."""
    told = facts.get(part)
    return isinstance(told, Mapping) and (part != "code" or isinstance(told.get("revision"), str))


def _seen(history: History, kind: str) -> Seen:
    marks = history.marks.get(kind, Marks())
    return Seen(len(marks.step), tuple(marks.step[:MOST_STEPS]))


def _costs(a: History, b: History) -> dict[str, tuple[float, float]]:
    """What both journals tell of."""
    found = {}
    for name, of_all in (("peak_bytes", max), ("seconds", median)):
        told = [[value for value in history.steps.values[name] if value > 0] for history in (a, b)]
        if all(told):
            found[name] = of_all(told[0]), of_all(told[1])
    return found


def _metrics(a: History, b: History) -> dict[str, Losses]:
    found = {}
    for name in sorted(a.metrics.keys() & b.metrics.keys()):
        left, right = a.metrics[name].steps, b.metrics[name].steps
        found[name] = compare(left.step, left.values["value"], right.step, right.values["value"])
    return found
