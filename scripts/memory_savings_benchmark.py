# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,!=2.12.*,<2.14", "numpy>=1.26", "click>=8.1", "rich>=13", "matplotlib>=3.8"]
# ///
"""Measure what every strategy saves on a model, and what it costs.

python scripts/memory_savings_benchmark.py --out savings --model transformer --batch-size 8,32 --limit 256MiB
"""

import environment

environment.require(__file__)

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from curry_train.bench.savings import (
    MEASURED_OUTCOME,
    SavingsRow,
    check_limit,
    choose_strategies,
    count_steps,
    load_with_depth,
    measure_savings,
)
from curry_train.cli.options import DTYPES, UnusableInput, choose_device, json_option, model_option
from curry_train.cli.savings import plot_savings, savings_table
from curry_train.core.blocks import find_blocks
from curry_train.core.wording import parse_bytes, provenance, write_json
from curry_train.plan.strategies import STRATEGIES
from curry_train.workloads.workload import Case

Measured = tuple[Case, int | None]
SAMPLES = 8
BATCH_SIZES = f"Several are written 8,32. [default: those of the factory's batch, or {SAMPLES}]"


def size_in_bytes(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """`--limit 2GiB` as bytes."""
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def whole_numbers(
    context: click.Context, option: click.Parameter, values: Sequence[str]
) -> list[int]:
    """`--batch-size 8,32 --batch-size 64` is 8, 32 and 64."""
    words = [word.strip() for value in values for word in value.split(",")]
    for word in words:
        if not (word.isascii() and word.isdecimal() and int(word)):
            raise click.BadParameter(
                f"{word!r} is no whole number from 1 up; several are written 8,32,128"
            )
    return list(dict.fromkeys(map(int, words)))


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR"
)
@model_option("models", multiple=True, more="Repeatable; transformer if left out.")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME",
    help=f"Repeatable; all if left out: {', '.join(STRATEGIES)}. none is measured in any case.",
)
@click.option("--batch-size", "sizes", multiple=True, callback=whole_numbers, help=BATCH_SIZES)
@click.option(
    "--depth",
    "depths",
    multiple=True,
    callback=whole_numbers,
    help="Blocks of a built-in workload.",
)
@click.option(
    "--limit",
    metavar="2GiB",
    callback=size_in_bytes,
    help="Also find the largest batch whose step fits this.",
)
@click.option(
    "--repeats",
    default=10,
    type=click.IntRange(1),
    show_default=True,
    help="Timed steps of each strategy.",
)
@click.option(
    "--blocks",
    metavar="PATTERN",
    help="Only blocks of these names, a glob such as 'encoder.layers.*'.",
)
@click.option(
    "--device", default="auto", type=click.Choice(["auto", "cuda", "cpu"]), show_default=True
)
@click.option("--dtype", default="float32", type=click.Choice(list(DTYPES)), show_default=True)
@click.option("--seed", default=0, type=click.IntRange(0), show_default=True)
@click.option(
    "--redraw",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="SAVINGS.JSON",
    help="Measure nothing: draw the picture of an earlier savings.json again.",
)
@json_option("Write savings.json here too; - is standard output.")
def main(
    out: Path,
    models: Sequence[str],
    strategies: Sequence[str],
    limit: int | None,
    repeats: int,
    device: str,
    json_path: str | None,
    redraw: Path | None,
    **options: Any,
) -> None:
    """Exit status: 0 measured, 1 a strategy is not the same training, 2 wrong usage, 3 no such device."""
    if redraw is not None:
        click.echo(_redraw(redraw, out))
        return
    place = choose_device(device)
    try:
        names, cases = (
            choose_strategies(strategies),
            _cases(models or ("transformer",), place, options),
        )
        if limit is not None:
            check_limit(limit, place)
        out.mkdir(parents=True, exist_ok=True)
        facts = provenance(place) | {
            "dtype": options["dtype"],
            "seed": options["seed"],
            "repeats": repeats,
        }
        rows = _measure(cases, names, repeats=repeats, limit=limit)
        data = facts | {"limit_bytes": limit, "rows": [row.to_json() for row in rows]}
        write_json(str(out / "savings.json"), data)
        picture = _draw(
            rows, out / "savings.png", device=f"{facts['device']}, torch {facts['torch']}"
        )
    except (ValueError, OSError) as error:
        raise UnusableInput(str(error)) from error
    if json_path:
        write_json(json_path, data)
    console = partial(click.echo, err=json_path == "-")
    console(
        f"{facts['device']}, torch {facts['torch']}, {options['dtype']}, seed {options['seed']}\n"
    )
    console(savings_table(rows, limit=limit))
    console(f"\nwrote {out / 'savings.json'}\n{picture}")
    if any(row.is_wrong for row in rows):
        sys.exit(1)


def _cases(models: Sequence[str], device: torch.device, options: dict[str, Any]) -> list[Measured]:
    """Every model at every depth and batch size, the sizes of one depth together."""
    cases: list[Measured] = []
    for spec in models:
        for depth in options["depths"] or [None]:
            workload = load_with_depth(spec, depth)
            for size in options["sizes"] or [workload.own_batch or SAMPLES]:
                case = Case(
                    workload,
                    device,
                    DTYPES[options["dtype"]],
                    size,
                    options["seed"],
                    options["blocks"],
                )
                cases.append((case, depth))
            if options["blocks"] is not None:
                find_blocks(
                    cases[-1][0].build(), options["blocks"]
                )  # a pattern that takes nothing is said here
    return cases


def _measure(
    cases: Sequence[Measured], names: Sequence[str], *, repeats: int, limit: int | None
) -> list[SavingsRow]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console, rows = Console(stderr=True), list[SavingsRow]()
    hints: dict[Any, dict[str, int]] = {}
    steps = len(cases) * count_steps(len(names), repeats=repeats, limit=limit)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=steps, completed=-1)
        for case, depth in cases:

            def tell(doing: str, case: Case = case) -> None:
                progress.update(
                    task, advance=1, description=f"{case.workload.name}, {case.batch_size}: {doing}"
                )

            guesses = hints.setdefault((case.workload.spec, depth), {})
            rows += measure_savings(
                case, names, depth=depth, repeats=repeats, limit=limit, hints=guesses, tell=tell
            )
    return rows


def _redraw(path: Path, out: Path) -> str:
    """The picture alone, of figures that were written before."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows, device = (
            [SavingsRow.from_json(row) for row in data["rows"]],
            f"{data['device']}, torch {data['torch']}",
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableInput(
            f"{path} is no savings.json of this command: {type(error).__name__}: {error}"
        ) from error
    out.mkdir(parents=True, exist_ok=True)
    return _draw(rows, out / "savings.png", device=device)


def _draw(rows: Sequence[SavingsRow], path: Path, *, device: str) -> str:
    """What to call the picture."""
    if not any(row.outcome == MEASURED_OUTCOME for row in rows):
        return "drew no picture, because nothing was measured"
    drawn = plot_savings(rows, path, device=device)
    others = len({row.label for row in rows}) - len(drawn)
    said = f"wrote {path}, which leaves out {others} and shows" if others else f"wrote {path}"
    return "\n  ".join([said, *(drawn if others else [])])


if __name__ == "__main__":
    main(prog_name="memory_savings_benchmark.py")
