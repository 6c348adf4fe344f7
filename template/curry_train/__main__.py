"""The command line of a project: `python -m curry_train gates` measures every claim on a model.

Proof: `python -m pytest tests/test_cli.py`.
"""

import fnmatch
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from .core.builtin import BUILTIN
from .core.load import load_workload
from .core.provenance import provenance, write_json
from .core.verdict import Gate, Verdict
from .core.workload import Case, WorkloadError
from .gates import discover

MARKS = {True: "[green]held[/]", False: "[red]FAILED[/]", None: "n/a"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DeviceMissing(click.ClickException):
    """The device asked for is not there."""

    exit_code = 3


class UnusableInput(click.ClickException):
    """What was typed can't be used."""

    exit_code = 2


@dataclass(frozen=True)
class Row:
    """A verdict and the workload that it was measured on."""

    workload: str
    verdict: Verdict


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        raise DeviceMissing(f"no CUDA device: torch {torch.__version__} is {built} and finds none. Use --device cpu")
    return torch.device(name)


def writable(path: str | None) -> str | None:
    """A path whose folder exists, so that a long run does not end in nothing."""
    if path not in (None, "-") and not Path(path).parent.is_dir():
        raise click.BadParameter(f"the folder of {path!r} does not exist: create it first")
    return path


def choose_gates(patterns: Sequence[str]) -> tuple[Gate, ...]:
    """The gates that any pattern names, by technique (`grad-accum`) or by glob (`grad-accum/*-window`)."""
    gates = discover()
    for pattern in patterns:
        if not any(_matches(gate, pattern) for gate in gates):
            raise UnusableInput(f"no gate matches {pattern!r}; there are {', '.join(gate.name for gate in gates)}")
    return tuple(gate for gate in gates if not patterns or any(_matches(gate, pattern) for pattern in patterns))


def _matches(gate: Gate, pattern: str) -> bool:
    return fnmatch.fnmatch(gate.name, pattern) or gate.name.startswith(f"{pattern}/")


@click.group(help=__doc__.splitlines()[0] if __doc__ else None)
def main() -> None:
    pass


@main.command("gates")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME|PKG.MODULE:FACTORY",
    help=f"A built-in workload ({', '.join(BUILTIN)}) or your own factory, which returns a module, a (module, batch) "
    "pair or a Workload. Repeatable; all built-in ones if left out.",
)
@click.option("--gate", "patterns", multiple=True, metavar="PATTERN", help="Only these gates: a technique or a glob.")
@click.option("--device", default="auto", type=click.Choice(["auto", "cuda", "cpu"]), show_default=True)
@click.option("--dtype", default="float32", type=click.Choice(list(DTYPES)), show_default=True)
@click.option("--batch-size", default=4, type=click.IntRange(1), show_default=True)
@click.option("--seed", default=0, type=click.IntRange(0), show_default=True)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True, writable=True),
    callback=lambda context, option, path: writable(path),
    help="Write the verdicts; - is standard output.",
)
@click.option("--list", "list_only", is_flag=True, help="Name the gates and stop.")
def gates_command(
    models: tuple[str, ...],
    patterns: tuple[str, ...],
    device: str,
    dtype: str,
    batch_size: int,
    seed: int,
    json_path: str | None,
    list_only: bool,
) -> None:
    """Measure every gate on a model. Exit status: 0 all held, 1 a gate failed, 2 wrong usage, 3 no such device."""
    gates, place = choose_gates(patterns), choose_device(device)
    if list_only:
        click.echo("\n".join(gate.name for gate in gates))
        return
    try:
        cases = [
            Case(load_workload(spec), device=place, dtype=DTYPES[dtype], batch_size=batch_size, seed=seed)
            for spec in models or BUILTIN
        ]
    except WorkloadError as error:
        raise UnusableInput(str(error)) from error
    console = Console(stderr=json_path == "-", highlight=False)
    facts = provenance(place)
    console.print(
        f"{facts['device']}, torch {facts['torch']}, {dtype}, batch size {batch_size}, seed {seed}", style="dim"
    )
    rows = list(_measure(cases, gates))
    _print_table(console, rows)
    if json_path:
        results = [{"workload": row.workload} | row.verdict.to_json() for row in rows]
        write_json(json_path, facts | {"dtype": dtype, "batch_size": batch_size, "seed": seed, "results": results})
    if any(row.verdict.passed is False for row in rows):
        sys.exit(1)


def _measure(cases: Sequence[Case], gates: Sequence[Gate]) -> Iterator[Row]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases) * len(gates))
        for case in cases:
            for gate in gates:
                progress.update(task, description=f"{case.workload.name}: {gate.name}")
                yield Row(case.workload.name, gate.run(case))
                progress.advance(task)


def _print_table(console: Console, rows: Sequence[Row]) -> None:
    """One line for what held, all that is known for what did not."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last = None
    for row in rows:
        if row.workload != last:
            table.add_row(f"[bold]{escape(row.workload)}[/]", "", "")
        table.add_row(f"  {row.verdict.gate}", MARKS[row.verdict.passed], escape(row.verdict.measured))
        last = row.workload
    console.print(table)
    for row in rows:
        if row.verdict.passed is not True:
            _print_detail(console, row)
    failed = sum(row.verdict.passed is False for row in rows)
    skipped = sum(row.verdict.passed is None for row in rows)
    held = len(rows) - failed - skipped
    console.print(f"\n{held} held, {failed} failed, {skipped} not applicable")


def _print_detail(console: Console, row: Row) -> None:
    verdict = row.verdict
    console.print(f"\n{row.workload}, {verdict.gate}: {MARKS[verdict.passed]}")
    facts = {
        "measured": verdict.measured,
        "required": verdict.required,
        "why" if verdict.passed is None else "what to do": verdict.hint,
    }
    for label, text in facts.items():
        console.print(f"  {label}: {escape(text)}")


if __name__ == "__main__":
    main(prog_name=f"python -m {__package__}")
