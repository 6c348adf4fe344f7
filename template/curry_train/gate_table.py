"""Terminal tables of gate results: a line per technique or per gate.

Proof: `python -m pytest tests/test_cli.py`.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .core.verdict import Verdict
from .gate_rows import Row

MARKS = {True: "[green]held[/]", False: "[red]FAILED[/]", None: "n/a"}


def print_summary(console: Console, rows: Sequence[Row], *, blocks: Mapping[str, str]) -> None:
    """Print a line for each technique, and all details of the gates that failed.

    A line counts the gates that held, failed and do not apply, with the reason.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for workload, of_workload in itertools.groupby(rows, key=lambda row: row.workload):
        table.add_row(f"[bold]{escape(workload)}[/]", f"[dim]{escape(blocks[workload])}[/]")
        by_technique: dict[str, list[Verdict]] = {}
        for row in of_workload:
            by_technique.setdefault(row.verdict.gate.split("/")[0], []).append(row.verdict)
        for technique, verdicts in by_technique.items():
            table.add_row(f"  {technique}", _counted(verdicts))
    console.print(table)
    _print_end(console, rows, more="; --figures shows what each measured")


def _counted(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.passed for verdict in verdicts)
    counted = ", ".join(
        f"{counts[passed]} {mark}" for passed, mark in MARKS.items() if counts[passed]
    )
    reasons = dict.fromkeys(verdict.hint for verdict in verdicts if verdict.passed is None)
    if len(reasons) > 1:
        return f"{counted} for {len(reasons)} reasons"
    return f"{counted}: {escape(next(iter(reasons)))}" if reasons else counted


def print_figures(console: Console, rows: Sequence[Row], *, blocks: Mapping[str, str]) -> None:
    """Print a line for each gate with its figures, and all details of the gates that failed."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last_workload = None
    for group in _together(rows):
        row = group[0]
        if row.workload != last_workload:
            table.add_row(
                f"[bold]{escape(row.workload)}[/]", "", f"[dim]{escape(blocks[row.workload])}[/]"
            )
        name = row.verdict.gate
        if len(group) > 1:
            name = f"{row.verdict.gate.split('/')[0]}: {len(group)} gates"
        table.add_row(f"  {name}", MARKS[row.verdict.passed], escape(_short(row.verdict)))
        last_workload = row.workload
    console.print(table)
    _print_end(console, rows, more="")


def _together(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Group the rows of a technique that do not apply for the same reason; others stay single."""

    def reason(row: Row) -> tuple[Any, ...]:
        technique, name = row.verdict.gate.split("/", 1)
        return row.workload, technique, row.verdict.hint if row.verdict.passed is None else name

    for _, group in itertools.groupby(rows, key=reason):
        yield list(group)


def _short(verdict: Verdict) -> str:
    return verdict.hint if verdict.passed is None else verdict.measured


def _print_end(console: Console, rows: Sequence[Row], *, more: str) -> None:
    for row in rows:
        if row.verdict.passed is False:
            _print_detail(console, row)
    failed = sum(row.verdict.passed is False for row in rows)
    skipped = sum(row.verdict.passed is None for row in rows)
    held = len(rows) - failed - skipped
    console.print(f"\n{held} held, {failed} failed, {skipped} not applicable{more}")


def _print_detail(console: Console, row: Row) -> None:
    verdict = row.verdict
    console.print(f"\n{row.workload}, {verdict.gate}: {MARKS[verdict.passed]}")
    facts = {"measured": verdict.measured, "required": verdict.required, "what to do": verdict.hint}
    for label, text in facts.items():
        console.print(f"  {label}: {escape(text)}")
