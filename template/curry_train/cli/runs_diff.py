"""Command `runs diff`: compare two runs by their journals.

Proof: `python -m pytest tests/cli/test_runs_diff_command.py`.
"""

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ..core.wording import format_bytes, write_json
from ..runs.comparison import (
    ABSENT_VALUE,
    Losses,
    Parting,
    RunDifference,
    Seen,
    SettingChange,
    difference,
)
from ..runs.history import History, read_history
from ..runs.journal import find_journal, finite, printable
from ..runs.ranks import RunError
from .options import UnusableInput, json_option
from .screen import ScreenCommand

TEXT_WIDTH = 80
MOST_CHANGES = 40  # changes shown per section; --json has all
MOST_STEPS = 4
# Longest name and value that fit into the table; longer ones get lines of their own.
LONGEST_CHANGE_NAME = 36
LONGEST_CHANGE_VALUE = 18


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
    try:
        histories = [read_history(find_journal(name, root=root), name=name) for name in (a, b)]
    except (RunError, ValueError) as error:
        raise UnusableInput(_wrapped(printable(str(error), longest=1000), indent="")) from error
    found = difference(*histories)
    click.echo(diff_text(found, histories), err=json_path == "-")
    if json_path:
        write_json(json_path, finite(found.to_json()))


def diff_text(found: RunDifference, histories: Sequence[History]) -> str:
    """Return the comparison, most telling first, at most 80 columns wide."""
    if found.same:
        only = histories[0]
        advice = ""
        if len(only.attempts) > 1:
            advice = f" To compare its attempts: {only.name}@1 {only.name}@2."
        return _wrapped(
            f"{found.a} and {found.b} are the same journal, so nothing differs.{advice}", indent=""
        )

    blocks = [
        list(_lead(found)),
        [_about(mark, history) for mark, history in zip("AB", histories, strict=True)],
    ]
    blocks += [
        list(_part(name, getattr(found, name), found)) for name in ("config", "code", "environment")
    ]
    blocks.append(list(_losses("losses", found.losses)))
    blocks += [
        list(_losses(printable(name, longest=30), losses)) for name, losses in found.metrics.items()
    ]
    blocks += [list(_costs(found, histories)), list(_events(found))]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _lead(found: RunDifference) -> Iterator[str]:
    if found.resumed is None:
        return
    earlier = found.resumed.earlier
    later = found.resumed.later
    step = found.resumed.step
    if found.resumed.how == "rollback":
        yield _wrapped(f"{later} rolled {earlier} back to step {step}")
    else:
        yield _wrapped(f"{later} resumed from {earlier} at step {step}")
    if not found.resumed.reached:
        yield _wrapped(
            f"but this journal of {earlier} does not have step {step}: "
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
    return _wrapped(f"{mark}  {history.name}: {span}{many}, {end}{damaged}", indent="   ")


def _part(name: str, changes: Sequence[SettingChange], found: RunDifference) -> Iterator[str]:
    recorded = zip((found.a, found.b), found.recorded[name], strict=True)
    unknown = [run for run, is_recorded in recorded if not is_recorded]
    if unknown:
        yield _wrapped(f"{name}: unknown for {' and '.join(unknown)}")
        return
    if not changes:
        yield f"{name}: the same"
        return
    rows = [
        (printable(change.name), _value(change.a), _value(change.b))
        for change in changes[:MOST_CHANGES]
    ]
    short = [
        row
        for row in rows
        if len(row[0]) <= LONGEST_CHANGE_NAME
        and max(len(row[1]), len(row[2])) <= LONGEST_CHANGE_VALUE
    ]
    name_width = max((len(row[0]) for row in short), default=0)
    value_width = max((len(row[1]) for row in short), default=0)

    yield f"{name:<{name_width + 4}}{'A':<{value_width}}  B" if short else name
    for row in rows:
        if row in short:
            yield f"  {row[0]:<{name_width}}  {row[1]:<{value_width}}  {row[2]}".rstrip()
            continue
        for text in (f"  {row[0]}", f"    A  {row[1]}", f"    B  {row[2]}"):
            yield _wrapped(text, indent=" " * 7)
    if len(changes) > MOST_CHANGES:
        yield f"  and {len(changes) - MOST_CHANGES} more: --json has all"


def _losses(name: str, losses: Losses) -> Iterator[str]:
    if not losses.num_common:
        spans = ["none" if span is None else _span(*span) for span in losses.spans]
        yield _wrapped(f"{name}: no step in common, A has {spans[0]} and B has {spans[1]}")
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
    for key, name, text in (("peak_bytes", peak, _size), ("seconds", "median step", _duration)):
        if key in found.costs:
            a, b = found.costs[key]
            yield f"{name:<15}  A {text(a)}, B {text(b)}, {b / a:.3g} of A"


def _size(value: float) -> str:
    return format_bytes(int(value))


def _duration(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


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
        yield _wrapped(
            f"  {printable(kind, longest=20):<{width}}  {counts}", indent=" " * (width + 4)
        )


def _seen(seen: Seen) -> str:
    if not seen.num:
        return "none"
    more = ", ..." if seen.num > MOST_STEPS else ""
    return f"{seen.num} at {', '.join(map(str, seen.steps[:MOST_STEPS]))}{more}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return printable(text) if value != ABSENT_VALUE else ABSENT_VALUE


def _wrapped(text: str, *, indent: str = "  ") -> str:
    return textwrap.fill(text, TEXT_WIDTH, subsequent_indent=indent, break_on_hyphens=False)
