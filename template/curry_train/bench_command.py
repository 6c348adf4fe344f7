"""The command that times training steps: what each lever costs and saves, or which of two models is faster.

Proof: `python -m pytest tests/test_bench_command.py`.
"""

import contextlib
import textwrap
from collections.abc import Callable, Iterator

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .bench_plot import plot_bench
from .bench_table import table
from .core.blocks import NoBlocks, find_blocks
from .core.load import load_workload
from .core.provenance import provenance, write_json
from .core.workload import Case
from .options import (
    DTYPES,
    UnusableInput,
    choose_device,
    model_option,
    plot_option,
    run_options,
    samples_of,
)
from .plan.bench import measure_levers
from .plan.levers import HELP, find_lever, list_levers
from .plan.optimizers import OPTIMIZERS, make_optimizer
from .plan.peak_rate import MEASURED
from .plots import require_matplotlib

TERA = 1e12


def _levers() -> str:
    told = "; ".join(f"{name}, {text}" for name, text in HELP.items())
    strategies = ", ".join(name for name in list_levers() if name not in HELP)
    return f"Repeatable, and joined with a plus: {strategies}; {told}."


def _peak(context: click.Context, option: click.Parameter, text: str | None) -> float | str | None:
    if text is None or text == MEASURED:
        return text
    try:
        rate = float(text) * TERA
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise click.BadParameter(f"{text!r} is no peak: give TFLOP/s, such as 989, or {MEASURED!r}")
    return rate


@click.command("bench")
@model_option("spec", required=True)
@click.option("--lever", "levers", multiple=True, metavar="NAME", help=_levers())
@click.option(
    "--against",
    multiple=True,
    metavar="NAME|FACTORY",
    help="Another model on the same batch. Repeatable.",
)
@click.option(
    "--steps", default=20, type=click.IntRange(1), show_default=True, help="Rounds that count."
)
@click.option(
    "--warmup", default=5, type=click.IntRange(0), show_default=True, help="Rounds before them."
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    help=f"{', '.join(OPTIMIZERS)}, or bytes for each parameter.",
)
@click.option(
    "--peak",
    metavar="TFLOPS|measured",
    callback=_peak,
    help="What utilisation is a part of; the data sheet's peak of the card if left out.",
)
@plot_option("Draw times and peaks as PNG; needs matplotlib.")
@run_options
def bench_command(
    spec: str,
    levers: tuple[str, ...],
    against: tuple[str, ...],
    steps: int,
    warmup: int,
    optimizer: str,
    peak: float | str | None,
    plot_path: str | None,
    blocks: str | None,
    device: str,
    dtype: str,
    batch_size: int | None,
    seed: int,
    json_path: str | None,
) -> None:
    """Time whole optimizer steps, plain and with each lever, in turns. Exit status: 0 measured, also where a lever does
    not apply, 2 wrong usage, 3 no such device."""
    place = choose_device(device)
    try:
        chosen = [find_lever(name) for name in dict.fromkeys(levers)]
        workload = load_workload(spec)
        size = samples_of(workload, batch_size)
        case = Case(workload, place, DTYPES[dtype], batch_size=size, seed=seed, blocks=blocks)
        _check_blocks(case)
        others = [load_workload(other) for other in dict.fromkeys(against)]
        make_optimizer(optimizer, case.build())
        if plot_path:
            require_matplotlib()  # after what is wrong with the options, and before the work
        with _progress() as tell:
            bench = measure_levers(
                case,
                chosen,
                against=others,
                optimizer=optimizer,
                rounds=steps,
                warmup=warmup,
                peak=peak,
                tell=tell,
            )
    except (ValueError, RuntimeError) as error:
        raise UnusableInput(
            "\n".join(textwrap.wrap(str(error), 80, break_long_words=False))
        ) from error
    click.echo(table(bench), err=json_path == "-")
    facts = provenance(place)
    if plot_path:
        plot_bench(bench, plot_path, device=facts["device"])
    if json_path:
        figures = bench.to_json() | {"device": facts["device"]}
        write_json(json_path, facts | figures | {"seed": seed, "blocks": blocks})


def _check_blocks(case: Case) -> None:
    """A pattern that takes no module would be told once for each lever."""
    if case.blocks is not None:
        with contextlib.suppress(NoBlocks):
            find_blocks(case.build(), case.blocks)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Quiet where nobody looks."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("")
        yield lambda message: progress.update(task, description=message)
