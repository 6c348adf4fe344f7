"""The words on the terminal, readable at 80 columns. Proof: `python -m pytest tests/cli/test_scaffold_commands.py`."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from .bundle import Technique
from .compare import Change, Comparison, patch
from .plan import Plan, State

WIDTH = 80


def technique_lines(techniques: Iterable[Technique]) -> Iterator[str]:
    for technique in techniques:
        yield technique.name
        yield from textwrap.wrap(
            technique.decides, WIDTH, initial_indent="  ", subsequent_indent="  "
        )
        yield f"  {technique.home}"


def plan_lines(plan: Plan) -> Iterator[str]:
    """One line per file that is not simply there already, and the count of those that are."""
    for entry in plan.entries:
        if entry.state is not State.SAME:
            yield f"{entry.state:<9}{entry.path}"
    same = len(plan.having(State.SAME))
    if same:
        yield f"{State.SAME:<9}{_files(same)}"


def outcome_line(plan: Plan, *, what: str, dry_run: bool) -> str:
    if not plan.writes:
        return f"Nothing to do: {what} is in {plan.root} already."
    done = "Dry run: would write" if dry_run else "Wrote"
    return f"{done} {_files(len(plan.writes))} for {what} in {plan.root}."


def comparison_lines(comparisons: Sequence[Comparison], *, with_patch: bool) -> Iterator[str]:
    """One line per file, with its patch on request, then how many there are of each."""
    for comparison in comparisons:
        yield f"{comparison.change:<22}{comparison.path}"
        if with_patch:
            yield from patch(comparison).splitlines()
    counts = Counter(comparison.change for comparison in comparisons)
    summary = ", ".join(f"{counts[change]} {change}" for change in Change if counts[change])
    yield from textwrap.wrap(
        f"{_files(len(comparisons))}: {summary}", WIDTH, subsequent_indent="  "
    )


def _files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"
