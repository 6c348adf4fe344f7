"""The command that compares two runs by their journals: `diff_command`, for the group `runs`.

Proof: `python -m pytest tests/test_runs_diff_command.py`.
"""

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import click

from .core.provenance import write_json
from .core.sizes import format_bytes
from .options import UnusableInput, json_option
from .runs.diff import ABSENT, Change, Difference, Losses, Parting, Seen, difference
from .runs.errors import RunError
from .runs.journal_history import History, read_history
from .runs.journal_lines import finite, printable
from .runs.journal_reading import find_journal

WIDTH = 80
MOST_CHANGES = 40  # of one part that are shown; --json has all
MOST_STEPS = 4
NAME, VALUE = 36, 18  # the widest of a table; what is longer has lines of its own


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--runs",
    "root",
    default="runs",
    show_default=True,
    metavar="DIR",
    help="Where runs of a name are.",
)
@json_option("Write all of it; - is standard output.")
def diff_command(a: str, b: str, root: str, json_path: str | None) -> None:
    """Say how run B differs from run A: what it resumed from, configuration, code and environment, where losses part.

    A run is a name in --runs, a folder or a journal; NAME@2 is the run as its second attempt left it.
    Exit status: 0 they were compared, 2 one can't be read.
    """
    try:
        histories = [read_history(find_journal(name, root=root), name=name) for name in (a, b)]
    except (RunError, ValueError) as error:
        raise UnusableInput(_wrapped(printable(str(error), longest=1000), indent="")) from error
    found = difference(*histories)
    click.echo(diff_text(found, histories), err=json_path == "-")
    if json_path:
        write_json(json_path, finite(found.to_json()))


def diff_text(found: Difference, histories: Sequence[History]) -> str:
    """The most telling first, in at most 80 columns."""
    if found.same:
        only = histories[0]
        advice = (
            f" To compare its attempts: {only.name}@1 {only.name}@2."
            if len(only.attempts) > 1
            else ""
        )
        return _wrapped(
            f"{found.a} and {found.b} are the same journal, so nothing differs.{advice}", indent=""
        )
    blocks = [
        list(_lead(found)),
        [_about(mark, each) for mark, each in zip("AB", histories, strict=True)],
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


def _lead(found: Difference) -> Iterator[str]:
    if found.resumed is None:
        return
    earlier, later, step = found.resumed.earlier, found.resumed.later, found.resumed.step
    if found.resumed.how == "rollback":
        yield _wrapped(f"{later} rolled {earlier} back to step {step}")
    else:
        yield _wrapped(f"{later} resumed from {earlier} at step {step}")
    if not found.resumed.reached:
        yield _wrapped(
            f"but this journal of {earlier} does not have step {step}: is it another run of that name?"
        )


def _about(mark: str, history: History) -> str:
    steps, attempts = history.steps.step, len(history.attempts)
    span = f"steps {_span(steps[0], steps[-1])}" if steps else "no step"
    many = f" in {attempts} attempts" if attempts > 1 else ""
    ended = history.attempts[-1].ended
    end = "no word of its end" if ended is None else f"ended by {printable(ended, longest=100)}"
    damaged = f", {history.num_damaged} damaged lines, the first is {history.first_damaged}"
    return _wrapped(
        f"{mark}  {history.name}: {span}{many}, {end}{damaged if history.num_damaged else ''}",
        indent="   ",
    )


def _part(name: str, changes: Sequence[Change], found: Difference) -> Iterator[str]:
    without = [
        each for each, told in zip((found.a, found.b), found.told[name], strict=True) if not told
    ]
    if without:
        yield _wrapped(f"{name}: not known of {' and '.join(without)}")
        return
    if not changes:
        yield f"{name}: the same"
        return
    rows = [
        (printable(change.name), _value(change.a), _value(change.b))
        for change in changes[:MOST_CHANGES]
    ]
    beside = [row for row in rows if len(row[0]) <= NAME and max(len(row[1]), len(row[2])) <= VALUE]
    widths = [max((len(row[column]) for row in beside), default=0) for column in (0, 1)]
    if beside:
        yield f"{name:<{widths[0] + 4}}{'A':<{widths[1]}}  B"
    else:
        yield name
    for row in rows:
        if row in beside:
            yield f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip()
            continue
        yield from (
            _wrapped(text, indent=" " * 7)
            for text in (f"  {row[0]}", f"    A  {row[1]}", f"    B  {row[2]}")
        )
    if len(changes) > MOST_CHANGES:
        yield f"  and {len(changes) - MOST_CHANGES} more: --json has all"


def _losses(name: str, losses: Losses) -> Iterator[str]:
    if not losses.num_common:
        told = ["none" if span is None else _span(*span) for span in losses.spans]
        yield _wrapped(f"{name}: no step in common, A has {told[0]} and B has {told[1]}")
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


def _costs(found: Difference, histories: Sequence[History]) -> Iterator[str]:
    """What a change is often made for; the losses say what it left alone."""
    devices = [
        str((history.facts.get("environment") or {}).get("device", "")) for history in histories
    ]
    peak = (
        "peak of process" if all(device.startswith("cpu") for device in devices) else "peak memory"
    )
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


def _events(found: Difference) -> Iterator[str]:
    room = max((len(kind) for kind in found.events), default=0)
    for number, (kind, (a, b)) in enumerate(found.events.items()):
        if not number:
            yield "events"
        told = f"{_seen(a)} in both" if a == b else f"A {_seen(a)}; B {_seen(b)}"
        yield _wrapped(
            f"  {printable(kind, longest=20):<{min(room, 20)}}  {told}",
            indent=" " * (min(room, 20) + 4),
        )


def _seen(seen: Seen) -> str:
    if not seen.num:
        return "none"
    more = ", ..." if seen.num > MOST_STEPS else ""
    return f"{seen.num} at {', '.join(map(str, seen.steps[:MOST_STEPS]))}{more}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return printable(text) if value != ABSENT else ABSENT


def _wrapped(text: str, *, indent: str = "  ") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
