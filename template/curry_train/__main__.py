"""Command line of a project.

`gates` measures every claim on a model, `memory` breaks down what holds its bytes, and `plan`
finds the fastest way to train it within a memory budget.

Proof: `python -m pytest tests/test_cli.py tests/test_timeline.py`.
"""

import contextlib
import fnmatch
import importlib
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from .core.blocks import NoBlocks, find_blocks
from .core.builtin import BUILTIN
from .core.load import load_workload
from .core.provenance import provenance, write_json
from .core.untouched import heap_kept
from .core.verdict import Gate, no_such_gate
from .core.workload import Case, Workload
from .gate_rows import Row, measure_rows
from .gate_table import print_figures, print_summary
from .gates import discover
from .options import (
    DTYPES,
    FEW,
    UnusableInput,
    choose_device,
    model_option,
    plot_option,
    run_options,
    samples_of,
)
from .plan.profiler import MemoryProfiler
from .plan.timeline import measure_timeline
from .plots import plot_timeline, require_matplotlib

OF_TECHNIQUES = ("train", "plan", "bench", "grad-flow", "runs")


def choose_gates(patterns: Sequence[str]) -> tuple[Gate, ...]:
    """Return the gates that match any pattern; without patterns, all gates.

    A pattern is a technique (`grad-accum`) or a glob (`grad-accum/*-window`).
    """
    gates = discover()
    if not patterns:
        return tuple(gates)

    chosen: set[str] = set()
    for pattern in patterns:
        matching = [gate.name for gate in gates if _matches(gate, pattern)]
        if not matching:
            raise UnusableInput(no_such_gate(pattern, [gate.name for gate in gates]))
        chosen.update(matching)
    return tuple(gate for gate in gates if gate.name in chosen)


def _matches(gate: Gate, pattern: str) -> bool:
    return fnmatch.fnmatch(gate.name, pattern) or gate.name.startswith(f"{pattern}/")


class Commands(click.Group):
    """Command group that adds the commands of the techniques installed in the project."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        installed = [
            name
            for name in OF_TECHNIQUES
            if importlib.util.find_spec(f"{__package__}.{_module_of(name)}")
        ]
        return sorted([*super().list_commands(ctx), *installed])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in OF_TECHNIQUES and cmd_name in self.list_commands(ctx):
            module = importlib.import_module(f"{__package__}.{_module_of(cmd_name)}")
            return cast(click.Command, getattr(module, _module_of(cmd_name)))
        return super().get_command(ctx, cmd_name)


def _module_of(name: str) -> str:
    """Return the name shared by a command's module and function: `grad_flow_command`."""
    return f"{name.replace('-', '_')}_command"


@click.group(cls=Commands)
def main() -> None:
    """Check, measure, plan and run the training of a PyTorch model."""


@main.command("gates")
@model_option("models", multiple=True, more="Repeatable; default: every built-in workload.")
@click.option(
    "--gate",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Run only these gates: a technique or a glob. Repeatable.",
)
@run_options
@click.option("--figures", is_flag=True, help="Show what each gate measured; implied by --gate.")
@click.option("--list", "list_only", is_flag=True, help="List the gates and exit.")
def gates_command(
    models: tuple[str, ...],
    patterns: tuple[str, ...],
    blocks: str | None,
    device: str,
    dtype: str,
    batch_size: int | None,
    seed: int,
    json_path: str | None,
    figures: bool,
    list_only: bool,
) -> None:
    """Measure every gate on a model.

    Exit status: 0 all gates held, 1 a gate failed, 2 wrong usage or no gate applies, 3 device
    not available.
    """
    gates = choose_gates(patterns)
    place = choose_device(device)
    batch_size = batch_size or FEW
    if list_only:
        click.echo("\n".join(gate.name for gate in gates))
        return

    try:
        workloads = [load_workload(spec) for spec in models or BUILTIN]
        cases = [
            Case(workload, place, DTYPES[dtype], batch_size=batch_size, seed=seed, blocks=blocks)
            for workload in _told_apart(workloads)
        ]
        blocks_by_workload = {case.workload.name: _blocks(case) for case in cases}
    except ValueError as error:
        raise UnusableInput(str(error)) from error

    console = Console(stderr=json_path == "-", highlight=False)
    facts = provenance(place)
    console.print(
        f"{facts['device']}, torch {facts['torch']}, {dtype}, batch size {batch_size}, seed {seed}",
        style="dim",
    )
    start = time.perf_counter()
    with heap_kept():
        rows = list(_measure(cases, gates))
    settings = {
        "dtype": dtype,
        "batch_size": batch_size,
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
    }

    show = print_figures if figures or patterns else print_summary
    show(console, rows, blocks=blocks_by_workload)
    if json_path:
        results = [{"workload": row.workload} | row.verdict.to_json() for row in rows]
        write_json(json_path, facts | settings | {"results": results})

    if any(row.verdict.passed is False for row in rows):
        sys.exit(1)
    if not any(row.verdict.passed for row in rows):
        raise UnusableInput(_why_nothing_was_checked(rows, patterns))


def _why_nothing_was_checked(rows: Sequence[Row], patterns: Sequence[str]) -> str:
    """Explain in one line why no gate applied, because that counts as wrong usage."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        reasons.setdefault(row.workload, {})[" ".join(row.verdict.hint.split())] = None
    models = " or ".join(f"{workload} ({'; '.join(why)})" for workload, why in reasons.items())
    return (
        f"nothing was checked: of {', '.join(patterns) or 'all gates'} no gate applies to {models}"
    )


def _told_apart(workloads: Sequence[Workload]) -> list[Workload]:
    """Rename workloads that share a name to the spec that the user typed."""
    occurrences = Counter(workload.name for workload in workloads)
    return [
        replace(workload, name=workload.spec) if occurrences[workload.name] > 1 else workload
        for workload in workloads
    ]


def _measure(cases: Sequence[Case], gates: Sequence[Gate]) -> Iterator[Row]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(cases) * len(gates))
        names = [f"{case.workload.name}: {gate.name}" for case in cases for gate in gates]
        rows = measure_rows(cases, gates)
        for name in names:
            progress.update(task, description=name)
            yield next(rows)
            progress.advance(task)


def _blocks(case: Case) -> str:
    """Describe the blocks in a few words, or the reason why the model has none.

    A pattern that matches no module is an error (ValueError).
    """
    try:
        names = list(find_blocks(case.build(), case.blocks))
    except NoBlocks as error:
        return error.in_short
    if len(names) == 1:
        return f"1 block, {names[0]}"
    return f"{len(names)} blocks, {names[0]} to {names[-1]}"


@main.command("memory")
@model_option("spec", required=True)
@run_options
@plot_option("Draw the timeline as PNG; needs matplotlib.")
def memory_command(
    spec: str,
    blocks: str | None,
    device: str,
    dtype: str,
    batch_size: int | None,
    seed: int,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Show what holds the memory of a step.

    Shows the bytes that each layer holds, and the owners of the peak of a training step.

    Exit status: 0 measured, 2 wrong usage, 3 device not available.
    """
    place = choose_device(device)
    try:
        workload = load_workload(spec)
        size = samples_of(workload, batch_size)
        case = Case(workload, device=place, dtype=DTYPES[dtype], batch_size=size, seed=seed)
        module = case.build()
        batch = case.batch()
        if plot_path:
            # A wrong pattern is reported before a missing package.
            with contextlib.suppress(NoBlocks):
                find_blocks(module, blocks)
            require_matplotlib()
        profile = MemoryProfiler(module).profile(batch, loss=case.workload.mean_loss, blocks=blocks)
        timeline = measure_timeline(module, batch, case.workload.mean_loss, blocks=blocks)
    except (ValueError, RuntimeError) as error:
        raise UnusableInput(str(error)) from error

    facts = provenance(place)
    header = f"{facts['device']}, torch {facts['torch']}, {dtype}, batch size {size}, seed {seed}"
    click.echo(f"{header}\n\n{profile.table()}\n\n{timeline.table()}", err=json_path == "-")
    if plot_path:
        plot_timeline(timeline, plot_path)
    if json_path:
        facts |= {"workload": case.workload.name, "dtype": dtype, "batch_size": size}
        results = {"profile": profile.to_json(), "timeline": timeline.to_json()}
        write_json(json_path, facts | {"seed": seed} | results)


if __name__ == "__main__":
    main(prog_name=f"python -m {__package__}")
