"""Command `runs diff`: compare two runs by their journals.

Everything that a journal records of a run, except its steps, is flattened to names and values, and
those that differ are the rows of one table. Losses and metrics are compared step by step.

Proof: `python -m pytest tests/cli/test_runs_diff.py`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from statistics import median

from ..core.wording import format_bytes, format_seconds
from ..runs.history import History, Steps, changes, read_history
from ..runs.journal import printable
from ..runs.values import Facts, Values
from .parameters import argument
from .screen import Ended, echo_lines, screen_command, table

SECTIONS = ("config", "code", "environment")


def difference(a: History, b: History) -> Facts:
    """Compare two runs; steps that were rolled back are left out."""
    runs = (a, b)
    unknown = {
        f"{section} of {run.name}": section
        for run in runs
        for section in SECTIONS
        if not _is_recorded(section, run.facts)
    }
    names = [name for name in (*SECTIONS, "command") if name not in unknown.values()]
    facts = [summary(run) | {name: run.facts.get(name) for name in names} for run in runs]
    return {
        "continued": continuation(a, b) or continuation(b, a),
        "changes": changes(*facts),
        # Sections that a journal does not record, so that they are not compared.
        "unknown": list(unknown),
        "losses": compare_values(a.steps, b.steps, "loss"),
        "metrics": {
            name: compare_values(a.metrics[name], b.metrics[name], "value")
            for name in sorted(a.metrics.keys() & b.metrics.keys())
        },
    }


def _is_recorded(section: str, facts: Values) -> bool:
    """Check for a section; code without a revision may be any code."""
    recorded = facts.get(section)
    if not isinstance(recorded, Mapping):
        return False
    return section != "code" or isinstance(recorded.get("revision"), str)


def summary(run: History) -> Facts:
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
        "damaged lines": len(run.damaged),
        "peak memory": format_bytes(max(peaks)) if peaks else None,
        "median step": format_seconds(median(seconds)) if seconds else None,
        "events": {kind: len(events) for kind, events in sorted(run.events.items())},
    }


def continuation(earlier: History, later: History) -> str | None:
    """Describe how `later`, a journal that begins as `earlier` does, goes on, or return None."""
    openings = [
        [(attempt.time, attempt.kind, attempt.step) for attempt in run.attempts]
        for run in (earlier, later)
    ]
    number = len(openings[0])
    if not number or openings[1][:number] != openings[0] or openings[1] == openings[0]:
        return None
    opened = later.attempts[number]
    if opened.kind == "rollback":
        return f"{later.name} rolled {earlier.name} back to step {opened.step}"
    return f"{later.name} resumed from {earlier.name} at step {opened.step}"


def compare_values(a: Steps, b: Steps, name: str) -> Facts:
    """Compare the values at the steps that both have; nan on both sides counts as equal."""
    of_a, of_b = (dict(zip(run.step, run.values[name], strict=True)) for run in (a, b))
    common = [step for step in of_a if step in of_b]
    found = [
        {"step": step, "a": of_a[step], "b": of_b[step]}
        for step in common
        # As text nan equals itself.
        if repr(of_a[step]) != repr(of_b[step])
    ]

    def size(difference: Mapping[str, float]) -> tuple[bool, float]:
        by = difference["b"] - difference["a"]
        return math.isnan(by), abs(by)

    return {
        "num_common": len(common),
        "num_different": len(found),
        "first_common": common[0] if common else None,
        "last_common": common[-1] if common else None,
        "first": found[0] if found else None,
        "largest": max(found, key=size, default=None),
    }


def describe(found: Values) -> Iterator[str]:
    """Yield the comparison in lines."""
    if found["continued"]:
        yield found["continued"]
    rows = [["", "A", "B"]]
    for change in found["changes"]:
        values = (
            printable(one if isinstance(one, str) and one else json.dumps(one))
            for one in (change["a"], change["b"])
        )
        rows.append([printable(change["name"]), *values])
    if found["changes"]:
        yield table(rows, texts=("A", "B"))
    if found["unknown"]:
        yield f"not recorded: {', '.join(found['unknown'])}"
    yield from _describe_values("losses", found["losses"])
    for name, compared in found["metrics"].items():
        yield from _describe_values(printable(name, longest=30), compared)


def _describe_values(name: str, found: Values) -> Iterator[str]:
    if not found["num_common"]:
        yield f"{name}: no step in common"
        return
    steps = f"common steps, {found['first_common']} to {found['last_common']}"
    if not found["num_different"]:
        yield f"{name}: equal to the bit in {found['num_common']} {steps}"
        return
    yield f"{name}: {found['num_different']} of {found['num_common']} {steps}, differ"
    for word, one in {"first": found["first"], "most": found["largest"]}.items():
        if word == "first" or one != found["first"]:
            a, b = one["a"], one["b"]
            yield f"  {word} at step {one['step']}: A {a:.9g}, B {b:.9g}, by {b - a:+.3g}"


@screen_command("diff", example="run-001 run-002")
def diff_command(a: str = argument(), b: str = argument()) -> Ended:
    """Compare two runs by their journals.

    Prints what differs in configuration, code, environment, events and costs, and the first step
    with another loss.

    A run is a name in runs/, a folder or a journal; NAME@2 is the run as its second attempt left
    it. Exit status: 0 compared, 2 a run can't be read.
    """
    found = difference(*(read_history(name, root="runs") for name in (a, b)))
    echo_lines(*describe(found))
    return {"a": a, "b": b} | found, 0
