"""The validate command: measure every gate on a model, with its table.

Proof: `python -m pytest tests/cli/test_cli.py tests/plan/test_timeline.py`.
"""

import contextlib
import fnmatch
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..core.blocks import NoBlocks, find_blocks
from ..core.measure import heap_kept
from ..core.wording import provenance, write_json
from ..gates.first_look import FailureCause, explained, look
from ..gates.verdict import (
    Gate,
    GateRow,
    Implementation,
    Verdict,
    WrongImplementation,
    claims,
    discover,
    judged_of,
    load_implementation,
    measure_rows,
    no_such_gate,
    techniques_of,
)
from ..primitives.running_blocks import BlockChoice
from ..workloads.models import BUILTIN_WORKLOADS, load_workload
from ..workloads.workload import Case, Workload
from .options import (
    DEFAULT_BATCH_SIZE,
    UnusableInput,
    case_of,
    choose_device,
    dtype_name,
    echo_notes,
    first_line,
    run_options,
    settle_blocks,
    training_options,
)
from .screen import ScreenCommand, progress_on_screen

# Terminal tables of gate results: a line per technique or per gate.


@dataclass(frozen=True)
class FirstLook:
    """The blocks of a model, and what was found before its gates ran."""

    choice: BlockChoice
    findings: tuple[FailureCause, ...]

    def lines(self) -> list[str]:
        """Return the notes on the blocks and, numbered, each cause."""
        causes = [finding.text for finding in self.findings]
        notes = [line for line in self.choice.lines() if line not in causes]
        return [*notes, *(f"cause {at}: {cause}" for at, cause in enumerate(causes, 1))]

    def findings_json(self) -> list[dict[str, Any]]:
        return [asdict(finding) for finding in self.findings]

    def short(self, reason: str) -> str:
        """Return the number of a cause in place of its text, which stands with the model."""
        causes = [finding.text for finding in self.findings]
        return f"cause {causes.index(reason) + 1}" if reason in causes else reason


VERDICT_MARKS = {True: "[green]held[/]", False: "[red]FAILED[/]", None: "n/a"}


def print_summary(
    console: Console, rows: Sequence[GateRow], *, looks: Mapping[str, FirstLook]
) -> None:
    """Print a line for each technique, and all details of the gates that failed.

    A line counts the gates that held, failed and do not apply, with the reason.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for workload, of_workload in itertools.groupby(rows, key=lambda row: row.workload):
        table.add_row(f"[bold]{escape(workload)}[/]", _dim(looks[workload]))
        by_technique: dict[str, list[Verdict]] = {}
        for row in of_workload:
            by_technique.setdefault(row.verdict.gate.split("/")[0], []).append(row.verdict)
        for technique, verdicts in by_technique.items():
            table.add_row(f"  {technique}", _counted(verdicts, looks[workload]))
    console.print(table)
    _print_end(console, rows, more="; --figures shows what each measured")


def _dim(seen: FirstLook) -> str:
    return f"[dim]{escape(chr(10).join(seen.lines()))}[/]"


def _counted(verdicts: Sequence[Verdict], seen: FirstLook) -> str:
    counts = Counter(verdict.passed for verdict in verdicts)
    counted = ", ".join(
        f"{counts[passed]} {mark}" for passed, mark in VERDICT_MARKS.items() if counts[passed]
    )
    reasons = dict.fromkeys(
        seen.short(verdict.hint) for verdict in verdicts if verdict.passed is None
    )
    if len(reasons) > 1:
        return f"{counted} for {len(reasons)} reasons"
    return f"{counted}: {escape(next(iter(reasons)))}" if reasons else counted


def print_figures(
    console: Console, rows: Sequence[GateRow], *, looks: Mapping[str, FirstLook]
) -> None:
    """Print a line for each gate with its figures, and all details of the gates that failed."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last_workload = None
    for group in _together(rows):
        row = group[0]
        if row.workload != last_workload:
            table.add_row(f"[bold]{escape(row.workload)}[/]", "", _dim(looks[row.workload]))
        name = row.verdict.gate
        if len(group) > 1:
            name = f"{row.verdict.gate.split('/')[0]}: {len(group)} gates"
        table.add_row(
            f"  {name}",
            VERDICT_MARKS[row.verdict.passed],
            escape(_short(row.verdict, looks[row.workload])),
        )
        last_workload = row.workload
    console.print(table)
    _print_end(console, rows, more="")


def _together(rows: Sequence[GateRow]) -> Iterator[list[GateRow]]:
    """Group the rows of a technique that do not apply for the same reason; others stay single."""

    def reason(row: GateRow) -> tuple[Any, ...]:
        technique, name = row.verdict.gate.split("/", 1)
        return row.workload, technique, row.verdict.hint if row.verdict.passed is None else name

    for _, group in itertools.groupby(rows, key=reason):
        yield list(group)


def _short(verdict: Verdict, seen: FirstLook) -> str:
    return seen.short(verdict.hint) if verdict.passed is None else verdict.measured


def print_mode(console: Console, rows: Sequence[GateRow], left_out: Sequence[Gate]) -> None:
    """Print how many claims were checked, and those that only `--thorough` checks."""
    run = {row.verdict.gate for row in rows if row.verdict.passed is not None}
    checked = sum(claim.gate in run for claim in claims())
    if not checked:
        return
    line = f"{checked} claim{'s' if checked > 1 else ''} checked"
    if left_out:
        gates = ", ".join(gate.name for gate in left_out)
        line += f"; add --thorough for {gates}, which takes longer"
    console.print(line)


def list_claims(gates: Sequence[Gate]) -> str:
    """Return a line for each claim of these gates: its name, its gate, and the claim."""
    names = {gate.name for gate in gates}
    rows = [claim for claim in claims() if claim.gate in names]
    return "\n".join(f"{claim.name}  {claim.gate}  {claim.text}" for claim in rows)


def _print_end(console: Console, rows: Sequence[GateRow], *, more: str) -> None:
    for row in rows:
        if row.verdict.passed is False:
            _print_detail(console, row)
    failed = sum(row.verdict.passed is False for row in rows)
    skipped = sum(row.verdict.passed is None for row in rows)
    held = len(rows) - failed - skipped
    console.print(f"\n{held} held, {failed} failed, {skipped} not applicable{more}")


def _print_detail(console: Console, row: GateRow) -> None:
    verdict = row.verdict
    console.print(f"\n{row.workload}, {verdict.gate}: {VERDICT_MARKS[verdict.passed]}")
    facts = {"measured": verdict.measured, "required": verdict.required, "what to do": verdict.hint}
    for label, text in facts.items():
        console.print(f"  {label}: {escape(text)}")


# Command line of a project.


def choose_gates(patterns: Sequence[str], given: Sequence[Implementation] = ()) -> tuple[Gate, ...]:
    """Return the gates that match any pattern; without patterns, all, or all that judge `given`.

    A pattern is a technique (`grad-accum`) or a glob (`grad-accum/*-window`).
    """
    gates = discover(patterns)
    if not patterns:
        names = {one.judged for one in given}
        return tuple(gate for gate in gates if not names or names & gate.judges.keys())

    chosen: set[str] = set()
    for pattern in patterns:
        matching = [gate.name for gate in gates if _matches(gate, pattern)]
        if not matching:
            raise UnusableInput(no_such_gate(pattern, [gate.name for gate in discover()]))
        chosen.update(matching)
    return tuple(gate for gate in gates if gate.name in chosen)


def quick_gates(
    gates: Sequence[Gate], patterns: Sequence[str], *, thorough: bool
) -> tuple[tuple[Gate, ...], tuple[Gate, ...]]:
    """Split the gates into those to run, and those that take longer and are not named."""
    left_out = tuple(
        gate for gate in gates if gate.thorough and not thorough and gate.name not in patterns
    )
    return tuple(gate for gate in gates if gate not in left_out), left_out


def load_implementations(
    texts: Sequence[str], patterns: Sequence[str]
) -> tuple[Implementation, ...]:
    """Load what `--impl` names; without patterns it may belong to any technique."""
    if not texts:
        return ()
    techniques = techniques_of(patterns)
    judged = {technique: judged_of(technique) for technique in techniques}
    try:
        return tuple(load_implementation(text, judged, techniques=techniques) for text in texts)
    except WrongImplementation as error:
        raise UnusableInput(" ".join(str(error).split())) from error


def _matches(gate: Gate, pattern: str) -> bool:
    return fnmatch.fnmatch(gate.name, pattern) or gate.name.startswith(f"{pattern}/")


@click.command("validate", cls=ScreenCommand, example="--model mlp --gate grad-accum")
@training_options("models", multiple=True, more="Repeatable; default: every built-in workload.")
@click.option(
    "--gate",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Run only these gates: a technique or a glob. Repeatable.",
)
@click.option(
    "--impl",
    "implementations",
    multiple=True,
    metavar="SPEC",
    help="Judge package.module:function instead of ours, or NAME=SPEC with a technique or what it "
    "stands for. Repeatable.",
)
@run_options
@click.option("--figures", is_flag=True, help="Show what each gate measured; implied by --gate.")
@click.option("--thorough", is_flag=True, help="Run the gates that take longer as well.")
@click.option(
    "--list", "list_only", is_flag=True, help="List the gates, with --figures their claims; exit."
)
def validate_command(
    models: tuple[str, ...],
    patterns: tuple[str, ...],
    implementations: tuple[str, ...],
    blocks: str | None,
    device: str,
    dtype: str | None,
    batch_size: int | None,
    seed: int,
    json_path: str | None,
    figures: bool,
    thorough: bool,
    list_only: bool,
) -> None:
    """Measure every gate on a model.

    Exit status: 0 all gates held, 1 a gate failed, 2 wrong usage or no gate applies, 3 device
    not available.
    """
    given = load_implementations(implementations, patterns)
    gates = choose_gates(patterns, given)
    place = choose_device(device)
    if list_only:
        click.echo(list_claims(gates) if figures else "\n".join(gate.name for gate in gates))
        return
    wanted = (dtype, batch_size, seed, blocks)
    gates, left_out = quick_gates(gates, () if thorough else patterns, thorough=thorough)
    try:
        cases = []
        looks: dict[str, FirstLook] = {}
        for workload in _named_once([load_workload(spec) for spec in models or BUILTIN_WORKLOADS]):
            case = case_of(workload, place, *wanted, default=DEFAULT_BATCH_SIZE)
            case, looks[workload.name] = _look(case)
            cases.append(case)
    except ValueError as error:
        raise UnusableInput(str(error)) from error

    console = Console(stderr=json_path == "-", highlight=False)
    facts = provenance(place)
    settings = _print_settings(console, cases, facts, seed)
    for one in given:
        console.print(f"judged: {one.spec} in place of our {one.judged}", style="dim")
        settings.setdefault("implementations", {})[one.judged] = one.spec
    start = time.perf_counter()
    with heap_kept():
        rows = list(_measure(cases, gates, given, looks))
    settings["seconds"] = round(time.perf_counter() - start, 1)
    (print_figures if figures or patterns else print_summary)(console, rows, looks=looks)
    print_mode(console, rows, left_out)
    if json_path:
        settings["left_out"] = [gate.name for gate in left_out]
        write_json(json_path, facts | settings | _as_json(rows, looks))
    _end(rows, patterns)


def _print_settings(
    console: Console, cases: Sequence[Case], facts: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Print what the cases are, and return it for the results."""
    sizes = list(dict.fromkeys(case.batch_size for case in cases))
    dtypes = ", ".join(dict.fromkeys(dtype_name(case.dtype) for case in cases))
    console.print(
        f"{facts['device']}, torch {facts['torch']}, {dtypes}, "
        f"batch size {', '.join(map(str, sizes))}, seed {seed}",
        style="dim",
    )
    for case in cases:
        echo_notes(case.workload, err=console.stderr)
    return {"dtype": dtypes, "batch_size": sizes[0] if len(sizes) == 1 else sizes, "seed": seed}


def _as_json(rows: Sequence[GateRow], looks: Mapping[str, FirstLook]) -> dict[str, Any]:
    of_gate: dict[str, list[str]] = {}
    for claim in claims():
        of_gate.setdefault(claim.gate, []).append(claim.name)
    results = []
    for row in rows:
        claimed = {"claims": of_gate.get(row.verdict.gate, [])}
        results.append({"workload": row.workload} | row.verdict.to_json() | claimed)
    return {
        "blocks": {name: seen.choice.to_json() for name, seen in looks.items()},
        "findings": {name: seen.findings_json() for name, seen in looks.items()},
        "results": results,
    }


def _end(rows: Sequence[GateRow], patterns: Sequence[str]) -> None:
    """End with status 1 if a gate failed, and with 2 if none applied."""
    if any(row.verdict.passed is False for row in rows):
        sys.exit(1)
    if not any(row.verdict.passed for row in rows):
        raise UnusableInput(_why_nothing_was_checked(rows, patterns))


def _why_nothing_was_checked(rows: Sequence[GateRow], patterns: Sequence[str]) -> str:
    """Explain in one line why no gate applied, because that counts as wrong usage."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        reasons.setdefault(row.workload, {})[" ".join(row.verdict.hint.split())] = None
    models = " or ".join(f"{workload} ({'; '.join(why)})" for workload, why in reasons.items())
    return (
        f"nothing was checked: of {', '.join(patterns) or 'all gates'} no gate applies to {models}"
    )


def _named_once(workloads: Sequence[Workload]) -> list[Workload]:
    """Rename workloads that share a name to the spec that the user typed."""
    occurrences = Counter(workload.name for workload in workloads)
    return [
        replace(workload, name=workload.spec) if occurrences[workload.name] > 1 else workload
        for workload in workloads
    ]


def _measure(
    cases: Sequence[Case],
    gates: Sequence[Gate],
    given: Sequence[Implementation],
    looks: Mapping[str, FirstLook],
) -> Iterator[GateRow]:
    with progress_on_screen() as progress:
        task = progress.add_task("", total=len(cases) * len(gates))
        names = [f"{case.workload.name}: {gate.name}" for case in cases for gate in gates]
        rows = measure_rows(cases, gates, implementations=given)
        for name in names:
            progress.update(task, description=name)
            row = next(rows)
            findings = looks[row.workload].findings
            yield replace(row, verdict=explained(row.verdict, findings))
            progress.advance(task)


def _look(case: Case) -> tuple[Case, FirstLook]:
    """Choose the blocks, and find what several gates would fail on.

    A model that can't run keeps the blocks of its containers. A pattern that matches no module is
    an error (ValueError).
    """
    if case.blocks is not None:
        with contextlib.suppress(NoBlocks):
            find_blocks(case.build(), case.blocks)
    # The user's model may raise anything, which each gate reports.
    try:
        case, choice = settle_blocks(case)
    except Exception as error:  # noqa: BLE001
        note = f"no forward could be recorded: {first_line(error)}"
        choice = BlockChoice((), None, None, (note,))
    try:
        return case, FirstLook(choice, look(case))
    except Exception:  # noqa: BLE001
        return case, FirstLook(choice, ())
