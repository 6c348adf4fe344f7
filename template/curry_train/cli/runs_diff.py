"""Command `runs diff`: compare two runs by their journals.

Proof: `python -m pytest tests/cli/test_runs_diff.py tests/cli/test_runs_diff_command.py`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import click
import numpy

from ..core.wording import format_bytes, format_seconds, write_json
from ..runs.history import Attempt, History, Steps, read_history
from ..runs.journal import find_journal, finite, printable
from .options import json_option
from .screen import ScreenCommand, fill_screen, table

# Compare two runs by their journals: configuration, code, losses, costs and events.

# Smallest relative difference of the loss that is visible in a plot.
VISIBLE_LOSS_DIFFERENCE = 0.01
# Stands for the value of a key that only the other run has.
ABSENT_VALUE = "(none)"
# Number of steps that are listed for each kind of event.
MOST_LISTED_STEPS = 20
CODE_FACTS = ("revision", "dirty", "changes", "why")


@dataclass(frozen=True)
class SettingChange:
    """One differing setting or fact: its dotted name, and both values as JSON values."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Continuation:
    """The step at which run `later` continues `earlier`; `how` is resume or rollback."""

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
    amount: float
    relative: float


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
class RunDifference:
    """The whole comparison of two runs, A and B."""

    a: str
    b: str
    # Whether both names mean the same journal, which therefore cannot differ.
    same: bool
    resumed: Continuation | None
    config: list[SettingChange]
    code: list[SettingChange]
    environment: list[SettingChange]
    losses: Losses
    # The highest peak and the median seconds of a step, of A and of B.
    costs: dict[str, tuple[float, float]] = field(default_factory=dict)
    metrics: dict[str, Losses] = field(default_factory=dict)
    # The events of A and of B, by kind.
    events: dict[str, tuple[Seen, Seen]] = field(default_factory=dict)
    # Whether the journals of A and of B record the configuration, the code and the environment.
    recorded: dict[str, tuple[bool, bool]] = field(default_factory=dict)


def difference(a: History, b: History) -> RunDifference:
    """Compare two runs; steps that were rolled back are left out."""
    sections = ("config", "code", "environment")
    changed = {name: changes(a.facts.get(name), b.facts.get(name)) for name in sections}
    command = changes(*({"command": run.facts.get("command")} for run in (a, b)))
    kinds = {*a.events, *b.events} - {"start"}
    return RunDifference(
        a.name,
        b.name,
        same=a.path.resolve() == b.path.resolve() and len(a.attempts) == len(b.attempts),
        resumed=find_continuation(a, b),
        config=changed["config"],
        code=[one for one in changed["code"] if one.name.split(".")[0] in CODE_FACTS],
        environment=command + changed["environment"],
        losses=compare_values(a.steps, b.steps, "loss"),
        costs=_costs_of_both(a, b),
        metrics={
            name: compare_values(a.metrics[name].steps, b.metrics[name].steps, "value")
            for name in sorted(a.metrics.keys() & b.metrics.keys())
        },
        events={
            kind: (_events_of_kind(a, kind), _events_of_kind(b, kind)) for kind in sorted(kinds)
        },
        recorded={name: (_known(name, a.facts), _known(name, b.facts)) for name in sections},
    )


def find_continuation(a: History, b: History) -> Continuation | None:
    """Return how B continues from A or A from B, or None.

    A and B may also be the same journal, read up to different attempts.
    """
    for earlier, later in ((a, b), (b, a)):
        if opening := _went_on(earlier, later):
            how = "rollback" if opening.kind == "rollback" else "resume"
            steps = earlier.steps.step
            reached = opening.step == 0 or (len(steps) > 0 and opening.step <= steps[-1])
            return Continuation(earlier.name, later.name, opening.step, how, reached)
    return None


def _went_on(earlier: History, later: History) -> Attempt | None:
    """Return the attempt of `later` that began from a state of `earlier`, or None."""
    if not earlier.attempts or not later.attempts:
        return None

    earlier_runs = {attempt.run for attempt in earlier.attempts} | {earlier.path.parent.name}
    later_runs = {attempt.run for attempt in later.attempts} | {later.path.parent.name}
    for attempt in later.attempts:
        if attempt.from_run is not None and attempt.from_run in earlier_runs - later_runs:
            return attempt

    # The same journal, or a copy that was continued, begins with all attempts of `earlier`.
    num_shared = len(earlier.attempts)
    openings = [_opening(attempt) for attempt in earlier.attempts]
    if [_opening(attempt) for attempt in later.attempts[:num_shared]] == openings:
        return next(iter(later.attempts[num_shared:]), None)
    return None


def _opening(attempt: Attempt) -> tuple[str | None, float, str, int]:
    return attempt.run, attempt.time, attempt.kind, attempt.step


def changes(a: Any, b: Any, *, name: str = "") -> list[SettingChange]:
    """List the differing leaves; a mapping that only one side has counts as one leaf."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: list[SettingChange] = []
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{name}.{key}" if name else str(key)
            found += changes(a.get(key, ABSENT_VALUE), b.get(key, ABSENT_VALUE), name=inner)
        return found
    return [] if _equal(a, b) or not name else [SettingChange(name, a, b)]


def _equal(a: Any, b: Any) -> bool:
    """Compare JSON values: 1 differs from true, and equals 1.0."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def compare_values(a: Steps, b: Steps, name: str) -> Losses:
    """Compare the values at the steps that both have; nan on both sides counts as equal."""
    common, places_a, places_b = numpy.intersect1d(
        a.step, b.step, assume_unique=True, return_indices=True
    )
    values_a = numpy.asarray(a.values[name])[places_a]
    values_b = numpy.asarray(b.values[name])[places_b]
    both_nan = numpy.isnan(values_a) & numpy.isnan(values_b)
    partings = []
    for place in numpy.flatnonzero((values_a != values_b) & ~both_nan):
        one, other = float(values_a[place]), float(values_b[place])
        amount = other - one
        relative = abs(amount / one) if math.isfinite(amount) and one else math.inf
        partings.append(Parting(int(common[place]), one, other, amount, relative))
    spans = [(part.step[0], part.step[-1]) if len(part) else None for part in (a, b)]
    return Losses(
        num_common=len(common),
        num_different=len(partings),
        first_common=int(common[0]) if len(common) else None,
        last_common=int(common[-1]) if len(common) else None,
        parted=next(iter(partings), None),
        visibly=next((one for one in partings if one.relative > VISIBLE_LOSS_DIFFERENCE), None),
        # A difference that is nan counts as infinite.
        largest=max(
            partings,
            key=lambda one: math.inf if math.isnan(one.amount) else abs(one.amount),
            default=None,
        ),
        spans=(spans[0], spans[1]),
    )


def _known(section: str, facts: Mapping[str, Any]) -> bool:
    """Return whether the journal records this section.

    Code without a revision counts as unknown, since two runs outside of git may run different code.
    """
    recorded = facts.get(section)
    if not isinstance(recorded, Mapping):
        return False
    return section != "code" or isinstance(recorded.get("revision"), str)


def _events_of_kind(history: History, kind: str) -> Seen:
    events = history.events.get(kind, [])
    return Seen(len(events), tuple(event.step for event in events[:MOST_LISTED_STEPS]))


def _costs_of_both(a: History, b: History) -> dict[str, tuple[float, float]]:
    """Return the highest peak and the median seconds of a step, where both journals record them."""
    found = {}
    for name, summarize in (("peak_bytes", max), ("seconds", median)):
        values_a = [value for value in a.steps.values[name] if value > 0]
        values_b = [value for value in b.steps.values[name] if value > 0]
        if values_a and values_b:
            found[name] = summarize(values_a), summarize(values_b)
    return found


# The command, its text and its JSON.

MOST_CHANGES = 40  # changes shown per section; --json has all
MOST_SHOWN_STEPS = 4


@click.command("diff", cls=ScreenCommand, example="run-001 run-002")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--runs",
    "root",
    default="runs",
    show_default=True,
    metavar="DIR",
    help="Folder of the runs given by name.",
)
@json_option()
def runs_diff_command(a: str, b: str, root: str, json_path: str | None) -> None:
    """Compare two runs by their journals.

    Compares configuration, code, environment and losses of runs A and B.

    A run is a name in --runs, a folder or a journal; NAME@2 is the run as its second attempt left
    it. Exit status: 0 compared, 2 a run can't be read.
    """
    histories = [read_history(find_journal(name, root=root), name=name) for name in (a, b)]
    found = difference(*histories)
    click.echo(diff_text(found, histories))
    if json_path:
        write_json(json_path, finite(asdict(found)))


def diff_text(found: RunDifference, histories: Sequence[History]) -> str:
    """Return the comparison, most telling first, at most 80 columns wide."""
    if found.same:
        only = histories[0]
        advice = ""
        if len(only.attempts) > 1:
            advice = f" To compare its attempts: {only.name}@1 {only.name}@2."
        return fill_screen(
            f"{found.a} and {found.b} are the same journal, so nothing differs.{advice}", indent=""
        )

    blocks = [
        _lead(found),
        map(_about, "AB", histories),
        *(_part(name, getattr(found, name), found) for name in ("config", "code", "environment")),
        _losses("losses", found.losses),
        *(_losses(printable(name, longest=30), one) for name, one in found.metrics.items()),
        _costs(found, histories),
        _events(found),
    ]
    texts = ("\n".join(lines) for lines in blocks)
    return "\n\n".join(text for text in texts if text)


def _lead(found: RunDifference) -> Iterator[str]:
    if found.resumed is None:
        return
    went = found.resumed
    how = (
        f"rolled {went.earlier} back to"
        if went.how == "rollback"
        else (f"resumed from {went.earlier} at")
    )
    yield fill_screen(f"{went.later} {how} step {went.step}")
    if not went.reached:
        yield fill_screen(
            f"but this journal of {went.earlier} does not have step {went.step}: "
            "is it another run of that name?"
        )


def _about(mark: str, history: History) -> str:
    steps = history.steps.step
    span = f"steps {_span(steps[0], steps[-1])}" if steps else "no step"
    num_attempts = len(history.attempts)
    many = f" in {num_attempts} attempts" if num_attempts > 1 else ""
    ended = history.attempts[-1].ended
    end = "no record of its end" if ended is None else f"ended by {printable(ended, longest=100)}"
    damaged = ""
    if history.num_damaged:
        damaged = f", {history.num_damaged} damaged lines, the first is {history.first_damaged}"
    return fill_screen(f"{mark}  {history.name}: {span}{many}, {end}{damaged}", indent="   ")


def _part(name: str, changes: Sequence[SettingChange], found: RunDifference) -> Iterator[str]:
    recorded = zip((found.a, found.b), found.recorded[name], strict=True)
    unknown = [run for run, is_recorded in recorded if not is_recorded]
    if unknown:
        yield fill_screen(f"{name}: unknown for {' and '.join(unknown)}")
        return
    if not changes:
        yield f"{name}: the same"
        return
    rows = [[name, "A", "B"]]
    for change in changes[:MOST_CHANGES]:
        rows.append([f"  {printable(change.name)}", _value(change.a), _value(change.b)])
    yield table(rows, texts=("A", "B"))
    if len(changes) > MOST_CHANGES:
        yield f"  and {len(changes) - MOST_CHANGES} more: --json has all"


def _losses(name: str, losses: Losses) -> Iterator[str]:
    if not losses.num_common:
        spans = ["none" if span is None else _span(*span) for span in losses.spans]
        yield fill_screen(f"{name}: no step in common, A has {spans[0]} and B has {spans[1]}")
        return
    many = "1 common step" if losses.num_common == 1 else f"{losses.num_common} common steps"
    span = f"{many}, {_span(losses.first_common or 0, losses.last_common or 0)}"
    if losses.parted is None:
        yield f"{name}: equal to the bit in {span}"
        return
    yield f"{name}: {losses.num_different} of {span}, differ"
    yield f"  part at step {_parting(losses.parted)}"
    if losses.visibly is not None and losses.visibly != losses.parted:
        yield f"  1% off at step {_parting(losses.visibly)}"
    if losses.largest is not None and losses.largest not in (losses.parted, losses.visibly):
        yield f"  most at step {_parting(losses.largest)}"


def _costs(found: RunDifference, histories: Sequence[History]) -> Iterator[str]:
    """Compare peak memory and median step time."""
    devices = [
        str((history.facts.get("environment") or {}).get("device", "")) for history in histories
    ]
    on_cpu = all(device.startswith("cpu") for device in devices)
    peak = "peak of process" if on_cpu else "peak memory"
    for key, name, text in (
        ("peak_bytes", peak, _size),
        ("seconds", "median step", format_seconds),
    ):
        if key in found.costs:
            a, b = found.costs[key]
            yield f"{name:<15}  A {text(a)}, B {text(b)}, {b / a:.3g} of A"


def _size(value: float) -> str:
    return format_bytes(int(value))


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def _parting(parting: Parting) -> str:
    relative = f" ({parting.relative:.2g} of A)" if math.isfinite(parting.relative) else ""
    return (
        f"{parting.step}: A {parting.a:.9g}, B {parting.b:.9g}, by {parting.amount:+.3g}{relative}"
    )


def _events(found: RunDifference) -> Iterator[str]:
    if found.events:
        yield "events"
    width = min(max((len(kind) for kind in found.events), default=0), 20)
    for kind, (a, b) in found.events.items():
        counts = f"{_seen(a)} in both" if a == b else f"A {_seen(a)}; B {_seen(b)}"
        yield fill_screen(
            f"  {printable(kind, longest=20):<{width}}  {counts}", indent=" " * (width + 4)
        )


def _seen(seen: Seen) -> str:
    if not seen.num:
        return "none"
    more = ", ..." if seen.num > MOST_SHOWN_STEPS else ""
    return f"{seen.num} at {', '.join(map(str, seen.steps[:MOST_SHOWN_STEPS]))}{more}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return printable(text) if value != ABSENT_VALUE else ABSENT_VALUE
