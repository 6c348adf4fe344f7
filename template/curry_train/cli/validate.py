"""The validate command: run every gate on a model, and print each verdict as it comes.

Proof: `python -m pytest tests/cli/test_cli.py tests/cli/test_interrupt.py`.
"""

import fnmatch
import functools
import inspect
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..core.measure import heap_kept
from ..core.wording import format_duration, format_seconds, provenance, write_json
from ..gates.first_look import FailureCause, explained, look
from ..gates.implementation import (
    CONTRACTS,
    Implementation,
    WrongImplementation,
    load_implementation,
)
from ..gates.loop_run import loop_verdicts
from ..gates.verdict import (
    KINDS_THAT_RUN,
    ONE_BLOCK,
    TO_RUN,
    Gate,
    GateRow,
    Verdict,
    claims,
    discover,
    measure_rows,
    no_such_gate,
    technique_of,
    techniques_of,
)
from ..plan.available import load_that_fits
from ..primitives.running_blocks import BlockChoice
from ..workloads.models import BUILTIN_WORKLOADS, is_taken
from ..workloads.shrink import SHRINK_PREFIX
from ..workloads.workload import Case, Workload
from .options import (
    DEFAULT_BATCH_SIZE,
    CaseOptions,
    check_blocks,
    dtype_name,
    echo_notes,
    first_line,
    run_options,
    settle_blocks,
    training_options,
)
from .screen import ScreenCommand, UnusableInput, fill_screen, progress_on_screen

# Terminal tables of gate results: a line per technique or per gate.


@dataclass(frozen=True)
class FirstLook:
    """The blocks of a model, and what was found before its gates ran."""

    choice: BlockChoice
    findings: tuple[FailureCause, ...]

    def lines(self) -> list[str]:
        """Return the notes on the blocks and, numbered, each cause."""
        causes = list(dict.fromkeys(finding.text for finding in self.findings))
        notes = [line for line in self.choice.lines() if line not in causes]
        return [*notes, *(f"cause {at}: {cause}" for at, cause in enumerate(causes, 1))]

    def findings_json(self) -> list[dict[str, Any]]:
        return [asdict(finding) for finding in self.findings]

    def short(self, reason: str) -> str:
        """Return the number of a cause in place of its text, which stands with the model."""
        causes = list(dict.fromkeys(finding.text for finding in self.findings))
        return f"cause {causes.index(reason) + 1}" if reason in causes else reason


VERDICT_MARKS = {True: "[green]held[/]", False: "[red]FAILED[/]", None: "n/a"}
NAME_WIDTH = 28  # of a technique or gate, before what is printed of it


class VerdictLines:
    """Prints verdicts as they come: a line per technique, or per gate with its figures."""

    def __init__(self, console: Console, looks: Mapping[str, FirstLook], *, by_gate: bool) -> None:
        self._console = console
        self._looks = looks
        self._by_gate = by_gate
        self._workload = ""
        self._technique = ""
        self._group: list[Verdict] = []
        self.rows: list[GateRow] = []

    def add(self, row: GateRow) -> None:
        self.rows.append(row)
        technique = technique_of(row.verdict.gate)
        if row.workload != self._workload or technique != self._technique:
            self.end_group()
        if row.workload != self._workload:
            self._print_columns(row.workload, "\n".join(self._looks[row.workload].lines()), "dim")
        self._workload = row.workload
        self._technique = technique
        self._group.append(row.verdict)
        if self._by_gate:
            self._print_gate(row.verdict, self._looks[row.workload])

    def findings(self, workload: str) -> tuple[FailureCause, ...]:
        return self._looks[workload].findings

    def end_group(self) -> None:
        """Print the line of a technique, of which all verdicts are there."""
        if self._group and not self._by_gate:
            counted = _counted(self._group, self._looks[self._workload])
            self._print_columns(f"  {self._technique}", counted)
        self._group = []

    def _print_gate(self, verdict: Verdict, seen: FirstLook) -> None:
        mark = VERDICT_MARKS[verdict.passed]
        text = f"{mark}: {escape(seen.short(verdict.hint))}"
        if verdict.required == TO_RUN and not verdict.ran:
            text = f"{mark} before your model ran: {escape(seen.short(_cause(verdict)))}"
        elif verdict.passed is not None:
            ran = " + ".join(verdict.ran) or "nothing"
            text = f"{mark} [dim]on {ran}[/]: {escape(verdict.measured)}"
        self._print_columns(f"  {verdict.gate}", text)

    def _print_columns(self, name: str, text: str, style: str = "") -> None:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(min_width=NAME_WIDTH, no_wrap=True)
        grid.add_row(name, Text.from_markup(text, style=style))
        self._console.print(grid)

    def print_end(self, notes: Sequence[str]) -> None:
        """Print the details of the gates that failed, the counts, and what of the user's ran."""
        self.end_group()
        failed = [row for row in self.rows if row.verdict.passed is False]
        causes: dict[tuple[str, ...], list[GateRow]] = {}
        for row in failed:
            facts = (row.verdict.measured, row.verdict.required, row.verdict.hint)
            causes.setdefault((row.workload, *facts), []).append(row)
        for rows in causes.values():
            _print_detail(self._console, rows)
        counts = Counter(row.verdict.passed for row in self.rows)
        counted = f"{counts[True]} held, {counts[False]} failed, {counts[None]} not applicable"
        more = "" if self._by_gate else "; --figures shows what each measured"
        self._console.print(f"\n{counted}{more}")
        for line in (coverage(self.rows), *notes):
            if line:
                self._console.print(line)


def coverage(rows: Sequence[GateRow]) -> str:
    """Count the gates that ran the user's model, loss, implementation and machine."""
    verdicts = [row.verdict for row in rows if row.verdict.passed is not None]
    counts = Counter(kind for verdict in verdicts for kind in verdict.ran)
    names = {"implementation": "your implementation", "machine": "this machine"}
    counted = [
        f"{counts[kind]} {names.get(kind, f'its {kind}')}"
        for kind in KINDS_THAT_RUN[1:]
        if counts[kind]
    ]
    models = len({row.workload for row in rows})
    gates = "1 gate" if counts["model"] == 1 else f"{counts['model']} gates"
    on_model = f"{gates} ran your {'model' if models == 1 else f'{models} models'}"
    return ", ".join([on_model, *counted]) if verdicts else ""


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


def list_claims(gates: Sequence[Gate]) -> str:
    """Return a line for each claim of these gates: its name, its gate, and the claim."""
    names = {gate.name for gate in gates}
    rows = [claim for claim in claims() if claim.gate in names]
    return "\n".join(f"{claim.name}  {claim.gate}  {claim.text}" for claim in rows)


def _cause(verdict: Verdict) -> str:
    """Return why a gate could not run, in which `could not be measured` adds nothing."""
    raised = verdict.measured if verdict.measured.startswith("raised") else ""
    return f"{raised}; {verdict.hint}" if raised else verdict.hint


def _print_detail(console: Console, rows: Sequence[GateRow]) -> None:
    """Print what failed, and what to do, once for all gates that failed alike."""
    verdict = rows[0].verdict
    gates = ", ".join(row.verdict.gate for row in rows)
    console.print(f"\n{rows[0].workload}, {gates}: {VERDICT_MARKS[verdict.passed]}")
    facts = {"measured": verdict.measured, "required": verdict.required, "what to do": verdict.hint}
    for label, text in facts.items():
        filled = fill_screen(f"  {label}: {text}", indent="    ")
        console.print(filled, markup=False, soft_wrap=True)


# Command line of a project.


def choose_gates(patterns: Sequence[str], given: Sequence[Implementation] = ()) -> tuple[Gate, ...]:
    """Return the gates that match any pattern; without patterns, all, or all that take `given`.

    A pattern is a technique (`grad-accum`) or a glob (`grad-accum/*-window`).
    """
    gates = discover(patterns)
    if not patterns:
        names = {one.name for one in given}
        return tuple(gate for gate in gates if not names or not names.isdisjoint(gate.takes))

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
    techniques = techniques_of(patterns)
    try:
        return tuple(load_implementation(text, techniques=techniques) for text in texts)
    except WrongImplementation as error:
        raise UnusableInput(" ".join(str(error).split())) from error


def _matches(gate: Gate, pattern: str) -> bool:
    return fnmatch.fnmatch(gate.name, pattern) or gate.name.startswith(f"{pattern}/")


def list_contracts(gates: Sequence[Gate]) -> str:
    """Return what `--impl` takes for these gates, by its name, and how it is called."""
    names = {name for gate in gates for name in gate.takes}
    lines = ["What --impl takes, by its name, and how the gates call it:"]
    for contract in CONTRACTS.values():
        if contract.name in names:
            lines.append(f"  {contract.name}{inspect.signature(contract.call)}")
            lines.append(fill_screen(f"      {contract.promise}", indent="      "))
    return "\n".join(lines if names else [])


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
    help="Check package.module:function instead of ours, or NAME=SPEC; --list --figures tells "
    "how each is called. Repeatable.",
)
@run_options
@click.option(
    "--shrink", type=click.IntRange(1), help="Check the same model with this many layers."
)
@click.option("--figures", is_flag=True, help="Show what each gate measured; implied by --gate.")
@click.option("--thorough", is_flag=True, help="Run the gates that take longer as well.")
@click.option(
    "--list",
    "list_only",
    is_flag=True,
    help="List the gates, with --figures their claims and what --impl takes; exit.",
)
def validate_command(
    models: tuple[str, ...],
    patterns: tuple[str, ...],
    implementations: tuple[str, ...],
    asked: CaseOptions,
    shrink: int | None,
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
    if list_only:
        names = "\n".join(gate.name for gate in gates)
        click.echo(f"{list_claims(gates)}\n\n{list_contracts(gates)}" if figures else names)
        return
    gates, left_out = quick_gates(gates, () if thorough else patterns, thorough=thorough)
    prefix = f"{SHRINK_PREFIX}{shrink}:" if shrink else ""
    specs = [prefix + spec for spec in models or BUILTIN_WORKLOADS]

    console = Console(highlight=False)
    facts = provenance(asked.device)
    forward_seconds = 0.0
    cases = []
    looks: dict[str, FirstLook] = {}
    make_case = functools.partial(asked.case, default=DEFAULT_BATCH_SIZE)
    loaded = [load_that_fits(spec, make_case).workload for spec in specs]
    for workload in _named_once(loaded):
        case, looks[workload.name], seconds = _look(make_case(workload))
        cases.append(case)
        forward_seconds += seconds

    is_long = _announce_time(console, forward_seconds, gates, shrinks=bool(shrink))
    if is_long:
        gates = tuple(sorted(gates, key=lambda gate: gate.steps))
    settings = _print_settings(console, cases, facts, asked.seed)
    for one in given:
        console.print(f"{one.spec} in place of our {one.name}", style="dim")
        settings.setdefault("implementations", {})[one.name] = one.spec
    lines = VerdictLines(console, looks, by_gate=bool(figures or patterns or is_long))
    settings["seconds"] = _measure(cases, gates, given, lines)
    notes = [f"add --thorough for {gate.name}, which takes longer" for gate in left_out]
    for spec, case in zip(specs, cases, strict=True):
        spec = spec.removeprefix(prefix)
        for verdict in loop_verdicts(spec) if is_taken(spec) else ():
            lines.add(GateRow(case.workload.name, verdict))
    lines.print_end(notes)
    if json_path:
        settings["left_out"] = [gate.name for gate in left_out]
        write_json(json_path, facts | settings | _as_json(lines.rows, looks))
    _end(lines.rows, patterns)


# A run that takes longer is announced, and a line is printed for each gate as it ends.
LONG_SECONDS = 120.0
# A step has a forward and a backward, which takes two of them.
FORWARDS_IN_A_STEP = 3


def _announce_time(
    console: Console, forward_seconds: float, gates: Sequence[Gate], *, shrinks: bool
) -> bool:
    """Print how long the gates take, if that is long; return whether it is.

    `forward_seconds` is what a forward of each model took, added up.
    """
    num_steps = sum(gate.steps for gate in gates)
    seconds = FORWARDS_IN_A_STEP * forward_seconds
    total = num_steps * seconds
    if total < LONG_SECONDS:
        return False
    steps = f"{num_steps} steps of {format_seconds(seconds)}, {format_duration(total)} in all"
    console.print(f"about {steps}: a line for each gate, short gates first")
    console.print(f"Quicker: {'' if shrinks else '--shrink 2, or '}--gate NAME")
    return True


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
        echo_notes(case.workload)
    return {"dtype": dtypes, "batch_size": sizes[0] if len(sizes) == 1 else sizes, "seed": seed}


def _as_json(rows: Sequence[GateRow], looks: Mapping[str, FirstLook]) -> dict[str, Any]:
    of_gate: dict[str, list[str]] = {}
    for claim in claims():
        of_gate.setdefault(claim.gate, []).append(claim.name)
    results = []
    for row in rows:
        claimed = {"claims": of_gate.get(row.verdict.gate, [])}
        results.append({"workload": row.workload} | asdict(row.verdict) | claimed)
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
    lines: VerdictLines,
) -> float:
    """Run the gates and print each line as soon as its verdicts are there; return the seconds."""
    start = time.perf_counter()
    with heap_kept(), progress_on_screen() as progress:
        task = progress.add_task("", total=len(cases) * sum(gate.steps for gate in gates))
        names = [(case.workload.name, gate) for case in cases for gate in gates]
        rows = measure_rows(cases, gates, implementations=given)
        for workload, gate in names:
            progress.update(task, description=f"{workload}: {gate.name}")
            row = next(rows)
            lines.add(replace(row, verdict=explained(row.verdict, lines.findings(row.workload))))
            progress.advance(task, gate.steps)
    return round(time.perf_counter() - start, 1)


def _look(case: Case) -> tuple[Case, FirstLook, float]:
    """Choose the blocks, find what several gates would fail on, and time a forward.

    A model that can't run keeps the blocks of its containers. A pattern that matches no module is
    an error (ValueError).
    """
    check_blocks(case)
    # The user's model may raise anything, which each gate reports.
    try:
        case, choice = settle_blocks(case)
    except Exception as error:  # noqa: BLE001
        note = f"no forward could be recorded: {first_line(error)}"
        choice = BlockChoice((), None, None, (note,))
    if not choice.names and case.workload.spec.startswith(f"{SHRINK_PREFIX}1:"):
        choice = BlockChoice((), None, None, (ONE_BLOCK,))
    seconds = 0.0
    try:
        module, batch = case.build(), case.batch()
        began = time.perf_counter()
        # Its number is there when the device is done.
        case.workload.mean_loss(module, batch).item()
        seconds = time.perf_counter() - began
        return case, FirstLook(choice, look(case)), seconds
    except Exception:  # noqa: BLE001
        return case, FirstLook(choice, ()), seconds
