"""Command `bench`: time training steps per lever, or compare models.

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
    strategies = ", ".join(name for name in list_levers() if name not in HELP)
    others = "; ".join(f"{name}, {text}" for name, text in HELP.items())
    return f"Repeatable; join several with a plus. {strategies}; {others}."


def _peak(context: click.Context, option: click.Parameter, text: str | None) -> float | str | None:
    if text is None or text == MEASURED:
        return text
    try:
        rate = float(text) * TERA
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise click.BadParameter(
            f"{text!r} is not a peak: give TFLOP/s, such as 989, or {MEASURED!r}"
        )
    return rate


@click.command("bench")
@model_option("spec", required=True)
@click.option("--lever", "levers", multiple=True, metavar="NAME", help=_levers())
@click.option(
    "--against",
    multiple=True,
    metavar="NAME|FACTORY",
    help="Also time another model on the same batch. Repeatable.",
)
@click.option(
    "--steps", default=20, type=click.IntRange(1), show_default=True, help="Timed rounds."
)
@click.option(
    "--warmup", default=5, type=click.IntRange(0), show_default=True, help="Rounds before timing."
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    help=f"{', '.join(OPTIMIZERS)}, or bytes per parameter.",
)
@click.option(
    "--peak",
    metavar="TFLOPS|measured",
    callback=_peak,
    help="Peak FLOP rate for MFU and HFU; default: the data sheet of the device.",
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
    """Time optimizer steps with each lever.

    The plain step and all levers are timed in turns, as whole optimizer steps.

    Exit status: 0 measured, even if a lever does not apply, 2 wrong usage, 3 device not available.
    """
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
            require_matplotlib()  # after the options are checked, before the work begins

        with _progress() as show_message:
            bench = measure_levers(
                case,
                chosen,
                against=others,
                optimizer=optimizer,
                rounds=steps,
                warmup=warmup,
                peak=peak,
                tell=show_message,
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
    """Report a pattern that matches no module once, and not once for each lever."""
    if case.blocks is not None:
        with contextlib.suppress(NoBlocks):
            find_blocks(case.build(), case.blocks)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show messages on a terminal; stay quiet elsewhere."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("")
        yield lambda message: progress.update(task, description=message)
