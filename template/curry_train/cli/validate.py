"""The validate command: run every gate on a model, and print each verdict as it comes.

Proof: `python -m pytest tests/cli/test_cli.py tests/cli/test_interrupt.py`.
"""

import contextlib
import functools
import inspect
import itertools
import time
import timeit
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from click import echo

from ..core.blocks import find_blocks
from ..core.measure import heap_kept
from ..core.wording import format_duration, format_seconds
from ..gates.first_look import FailureCause, explain_failure, look
from ..gates.implementation import CONTRACTS, Implementation, load_implementation
from ..gates.loop_events import grouped
from ..gates.loop_run import loop_verdicts
from ..gates.verdict import (
    KINDS_THAT_RUN,
    TO_RUN,
    Gate,
    Verdict,
    claims,
    discover,
    measure_all,
    technique_of,
)
from ..plan.available import load_that_fits
from ..primitives.running_blocks import BlockChoice
from ..workloads.models import BUILTIN_WORKLOADS, is_taken
from ..workloads.shrink import SHRINK_PREFIX
from ..workloads.workload import Case
from .options import (
    DEFAULT_BATCH_SIZE,
    CaseOptions,
    echo_notes,
    facts_of,
    heading,
    named_once,
    settle_blocks,
    training_options,
)
from .parameters import number_option, option, together
from .preflight import status_of
from .screen import (
    Ended,
    UnusableInput,
    echo_lines,
    fill_screen,
    messages_on_screen,
    screen_command,
)

ONE_BLOCK = "--shrink 1 leaves one block, and blocks are found by repetition: use --shrink 2"

# Lines of verdicts: one per technique or per gate.

VERDICT_MARKS = {True: "held", False: "FAILED", None: "n/a"}
NAME_WIDTH = 30  # of a technique or gate, before what is printed of it


@dataclass(frozen=True)
class FirstLook:
    """A case with its blocks, what was found before its gates ran, and the time of a forward."""

    case: Case
    choice: BlockChoice
    findings: tuple[FailureCause, ...]
    forward_seconds: float

    @property
    def causes(self) -> list[str]:
        return list(dict.fromkeys(finding.text for finding in self.findings))

    def lines(self) -> list[str]:
        """Return the notes on the blocks and, numbered, each cause."""
        notes = [line for line in self.choice.lines() if line not in self.causes]
        return [*notes, *(f"cause {at}: {cause}" for at, cause in enumerate(self.causes, 1))]

    def short(self, reason: str) -> str:
        """Return the number of a cause in place of its text, which stands with the model."""
        is_cause = reason in self.causes
        return f"cause {self.causes.index(reason) + 1}" if is_cause else reason


def print_verdicts(
    verdicts: Iterable[Verdict], looks: Mapping[str, FirstLook], *, by_gate: bool
) -> list[Verdict]:
    """Print verdicts as they come: a line per technique, or per gate with its figures."""
    printed: list[Verdict] = []
    for workload, of_workload in itertools.groupby(verdicts, lambda one: one.workload):
        first = looks[workload]
        for name, line in itertools.zip_longest([workload], first.lines(), fillvalue=""):
            _print_columns(name, line)
        techniques = itertools.groupby(of_workload, lambda one: technique_of(one.gate))
        for technique, group in techniques:
            begin = len(printed)
            for verdict in group:
                printed.append(verdict)
                if by_gate:
                    _print_columns(f"  {verdict.gate}", _format_gate(verdict, first))
            if not by_gate:
                _print_columns(f"  {technique}", _format_counts(printed[begin:], first))
    return printed


def _print_columns(name: str, text: str) -> None:
    line = fill_screen(f"{name:<{NAME_WIDTH - 1}} {text}", indent=" " * NAME_WIDTH)
    echo(line.replace("FAILED", click.style("FAILED", fg="red")))


def _format_gate(verdict: Verdict, first: FirstLook) -> str:
    mark = VERDICT_MARKS[verdict.passed]
    if verdict.required == TO_RUN and not verdict.ran:
        raised = f"{verdict.measured}; " if verdict.measured.startswith("raised") else ""
        return f"{mark} before your model ran: {first.short(raised + verdict.hint)}"
    if verdict.passed is None:
        return f"{mark}: {first.short(verdict.hint)}"
    ran = " + ".join(verdict.ran) or "nothing"
    return f"{mark} on {ran}: {verdict.measured}"


def _format_counts(verdicts: Sequence[Verdict], first: FirstLook) -> str:
    counts = Counter(verdict.passed for verdict in verdicts)
    counted = ", ".join(
        f"{counts[passed]} {mark}" for passed, mark in VERDICT_MARKS.items() if counts[passed]
    )
    reasons = {first.short(verdict.hint) for verdict in verdicts if verdict.passed is None}
    if len(reasons) > 1:
        return f"{counted} for {len(reasons)} reasons"
    return ": ".join([counted, *reasons])


def print_end(verdicts: Sequence[Verdict], *, by_gate: bool) -> None:
    """Print once what failed alike and what to do, the counts, and what of the user's ran."""
    failed = [one for one in verdicts if one.passed is False]
    for alike in grouped(failed, "workload", "measured", "required", "hint"):
        gates = ", ".join(one.gate for one in alike)
        first = alike[0]
        echo(f"\n{first.workload}, {gates}: {VERDICT_MARKS[False]}")
        echo_lines(
            f"  measured: {first.measured}",
            f"  required: {first.required}",
            f"  what to do: {first.hint}",
            indent="    ",
        )
    counts = Counter(one.passed for one in verdicts)
    counted = f"{counts[True]} held, {counts[False]} failed, {counts[None]} not applicable"
    if not by_gate:
        counted += "; --figures shows what each measured"
    echo(f"\n{counted}")
    if counts[True] + counts[False]:
        echo(coverage(verdicts))


def coverage(verdicts: Sequence[Verdict]) -> str:
    """Count the gates that ran the user's model, loss, implementation and machine."""
    counts = Counter(kind for one in verdicts if one.passed is not None for kind in one.ran)
    names = {"loss": "its loss", "machine": "this machine"}
    counted = [
        f"{names.get(kind, f'your {kind}')}: {counts[kind]}"
        for kind in KINDS_THAT_RUN
        if counts[kind]
    ]
    return f"gates that ran {', '.join(counted) or 'your model: 0'}"


# What is run.


def list_with_claims(gates: Sequence[Gate]) -> Iterator[str]:
    """Yield each claim of these gates, and what `--impl` takes for them and how it is called."""
    names = {gate.name for gate in gates}
    for claim in claims():
        if claim.gate in names:
            yield f"{claim.name}  {claim.gate}  {claim.text}"
    taken = [name for name in CONTRACTS if any(name in gate.takes for gate in gates)]
    if taken:
        yield "\nWhat --impl takes, by its name, and how the gates call it:"
    for name in taken:
        yield f"  {name}{inspect.signature(CONTRACTS[name].call)}"
        yield fill_screen(f"      {CONTRACTS[name].promise}", indent="      ")


@screen_command("validate", example="--model mlp --gate grad-accum")
def validate_command(
    models: tuple[str, ...] = training_options(
        multiple=True, more="Repeatable; default: every built-in workload."
    ),
    patterns: tuple[str, ...] = option(
        "Run only these gates: a technique or a glob. Repeatable.", "PATTERN", "--gate"
    ),
    implementations: tuple[str, ...] = option(
        "Check package.module:function instead of ours, or NAME=SPEC; --list --figures tells how "
        "each is called. Repeatable.",
        "SPEC",
        "--impl",
    ),
    asked: CaseOptions = together(CaseOptions),
    shrink: int | None = number_option("Check the same model with this many layers."),
    figures: bool = option("Show what each gate measured; implied by --gate."),
    list_only: bool = option(
        "List the gates, with --figures their claims and what --impl takes; exit.", flags="--list"
    ),
) -> Ended | None:
    """Measure every gate on a model.

    Exit status: 0 all gates held, 1 a gate failed, 2 wrong usage or no gate applies, 3 device
    not available.
    """
    given = list(map(load_implementation, implementations))
    gates = discover(patterns)
    if given and not patterns:
        gates = tuple(gate for gate in gates if any(one.name in gate.takes for one in given))
    if list_only:
        lines = list_with_claims(gates) if figures else (gate.name for gate in gates)
        echo("\n".join(lines))
        return None
    prefix = f"{SHRINK_PREFIX}{shrink}:" if shrink else ""
    specs = list(dict.fromkeys(models or BUILTIN_WORKLOADS))

    make_case = functools.partial(asked.case, default=DEFAULT_BATCH_SIZE)
    loaded = [load_that_fits(prefix + spec, make_case).workload for spec in specs]
    looks = {workload.name: _look(make_case(workload)) for workload in named_once(loaded)}

    seconds = FORWARDS_IN_A_STEP * sum(first.forward_seconds for first in looks.values())
    num_steps = sum(gate.steps for gate in gates)
    if is_long := seconds * num_steps >= LONG_SECONDS:
        total = f"{format_duration(num_steps * seconds)} in all"
        steps = f"{num_steps} steps of {format_seconds(seconds)}, {total}"
        echo(
            f"about {steps}: a line for each gate, short gates first\n"
            f"Quicker: {'' if shrink else '--shrink 2, or '}--gate NAME"
        )
        gates = tuple(sorted(gates, key=lambda gate: gate.steps))
    facts = facts_of([first.case for first in looks.values()])
    echo(heading(facts))
    for first in looks.values():
        echo_notes(first.case.workload)
    for one in given:
        echo(f"{one.spec} in place of our {one.name}")
        facts.setdefault("implementations", {})[one.name] = one.spec

    by_gate = bool(figures or patterns or is_long)
    loops = (
        replace(verdict, workload=name)
        for spec, name in zip(specs, looks, strict=True)
        if is_taken(spec)
        for verdict in loop_verdicts(spec)
    )
    began = time.perf_counter()
    with heap_kept():
        measured = itertools.chain(_run_gates(looks, gates, given), loops)
        verdicts = print_verdicts(measured, looks, by_gate=by_gate)
    facts["seconds"] = round(time.perf_counter() - began, 1)
    print_end(verdicts, by_gate=by_gate)
    return facts | _to_json(verdicts, looks), _choose_status(verdicts, patterns)


# A run that takes longer is announced, and a line is printed for each gate as it ends.
LONG_SECONDS = 120.0
# A step has a forward and a backward, which takes two of them.
FORWARDS_IN_A_STEP = 3


def _to_json(verdicts: Sequence[Verdict], looks: Mapping[str, FirstLook]) -> dict[str, Any]:
    results = [
        asdict(verdict) | {"claims": [one.name for one in claims() if one.gate == verdict.gate]}
        for verdict in verdicts
    ]
    return {
        "blocks": {name: first.choice.to_json() for name, first in looks.items()},
        "findings": {name: [*map(asdict, first.findings)] for name, first in looks.items()},
        "results": results,
    }


def _choose_status(verdicts: Sequence[Verdict], patterns: Sequence[str]) -> int | UnusableInput:
    models = []
    for of_model in grouped(verdicts, "workload"):
        reasons = dict.fromkeys(" ".join(one.hint.split()) for one in of_model)
        models.append(f"{of_model[0].workload} ({'; '.join(reasons)})")
    asked = ", ".join(patterns) or "all gates"
    return status_of(verdicts, f"of {asked} no gate applies to {' or '.join(models)}")


def _run_gates(
    looks: Mapping[str, FirstLook], gates: Sequence[Gate], given: Sequence[Implementation]
) -> Iterator[Verdict]:
    """Run the gates, and yield each verdict as soon as it is there."""
    cases = [first.case for first in looks.values()]
    verdicts = measure_all(cases, gates, implementations=given)
    for name, gate in itertools.product(looks, gates):
        with messages_on_screen(f"{name}: {gate.name}"):
            verdict = next(verdicts)
        yield explain_failure(verdict, looks[name].findings)


def _look(case: Case) -> FirstLook:
    """Choose the blocks, time a forward, and find what several gates would fail on.

    A model that can't run keeps the blocks of its containers. A pattern that matches no module is
    an error (ValueError).
    """
    if case.blocks is not None:
        find_blocks(case.build(), case.blocks)
    findings: tuple[FailureCause, ...] = ()
    seconds = 0.0
    # The user's model may raise anything, which each gate reports.
    case, choice = settle_blocks(case, reported=Exception)
    with contextlib.suppress(Exception):
        module, batch = case.build(), case.batch()
        # The quickest of three, as other work may have the cores for one. The number of a loss is
        # there when the device is done.
        seconds = min(
            timeit.repeat(lambda: case.workload.mean_loss(module, batch).item(), number=1, repeat=3)
        )
        findings = look(case)
    if not choice.names and case.workload.spec.startswith(f"{SHRINK_PREFIX}1:"):
        choice = replace(choice, notes=(ONE_BLOCK,))
    return FirstLook(case, choice, findings, seconds)
