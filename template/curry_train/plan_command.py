"""Command `plan`: find the fastest way to train within a memory budget.

It shows what owns the peak now, and writes the plan as a file. `scripts/plan_memory.py` and
`python -m curry_train plan` are the same command.

Proof: `python -m pytest tests/test_plan_memory.py`.
"""

import contextlib
import functools
import sys
import textwrap
from collections.abc import Callable, Iterator

import click
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .core.load import load_workload
from .core.provenance import provenance, write_json
from .core.sizes import format_bytes, parse_bytes
from .core.workload import Case
from .options import (
    DTYPES,
    UnusableInput,
    choose_device,
    json_option,
    model_option,
    output_option,
    plot_option,
)
from .plan.device_profile import PROFILES, find_profile, profile_of
from .plan.optimizers import OPTIMIZERS, make_optimizer
from .plan.options import KINDS, NONE
from .plan.planner import Infeasible, Planner
from .plan.report import Timeline
from .plan.saved_plan import Plan
from .plan.sharding import KINDS as PARALLEL
from .plan.sharding import Sharding
from .plan.step_lives import record_step
from .plan.timeline import timeline_of
from .plan_plot import plot_plan
from .plots import require_matplotlib


def _bytes(context: click.Context, option: click.Parameter, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("plan")
@model_option("spec", required=True)
@click.option(
    "--budget",
    "budget_bytes",
    required=True,
    callback=_bytes,
    help="Memory per rank, such as 24GiB.",
)
@click.option(
    "--global-batch",
    default=1,
    type=click.IntRange(1),
    show_default=True,
    help="Samples per optimizer step.",
)
@click.option(
    "--microbatch",
    type=click.IntRange(1),
    help="Samples per microbatch; default: try every divisor.",
)
@click.option(
    "--target",
    metavar="NAME",
    help=f"Device to plan for: {', '.join(PROFILES)}, or measured; default: this device.",
)
@click.option(
    "--dtype",
    default="float32",
    type=click.Choice(list(DTYPES)),
    show_default=True,
    help="Type of weights and batch.",
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    help=f"{', '.join(OPTIMIZERS)}, or bytes per parameter.",
)
@click.option("--parallel", type=click.Choice(list(PARALLEL)), help="How ranks share the training.")
@click.option(
    "--ranks", default=1, type=click.IntRange(1), show_default=True, help="Number of ranks."
)
@click.option("--blocks", metavar="PATTERN", help="Blocks to work on, a glob over module names.")
@click.option(
    "--without",
    multiple=True,
    type=click.Choice([kind for kind in KINDS if kind != NONE]),
    help="Do not use this. Repeatable.",
)
@click.option(
    "--also",
    multiple=True,
    metavar="PATTERN",
    help="Cheap modules that regions may recompute as well. Repeatable.",
)
@click.option(
    "--chunked-loss/--whole-loss",
    default=None,
    help="Loss in chunks, or whole; default: try both.",
)
@click.option(
    "--seed",
    default=0,
    type=click.IntRange(0),
    show_default=True,
    help="Seed of weights, batch and dropout.",
)
@click.option("--explain", is_flag=True, help="Show every candidate.")
@click.option(
    "--verify", is_flag=True, help="Run a planned step on this device and compare its peak."
)
@output_option("Write the plan for `Plan.load`.", "--out")
@plot_option("Draw cost against budget as PNG; needs matplotlib.")
@json_option("Write figures and plan; - is standard output.")
def plan_command(
    spec: str,
    budget_bytes: int,
    global_batch: int,
    microbatch: int | None,
    target: str | None,
    dtype: str,
    optimizer: str,
    parallel: str | None,
    ranks: int,
    blocks: str | None,
    without: tuple[str, ...],
    also: tuple[str, ...],
    chunked_loss: bool | None,
    seed: int,
    explain: bool,
    verify: bool,
    out: str | None,
    plot_path: str | None,
    json_path: str | None,
) -> None:
    """Find the fastest way to train within a memory budget.

    Exit status: 0 planned, 1 nothing fits, 2 wrong usage.
    """
    console = Console(stderr=json_path == "-", highlight=False, soft_wrap=True)
    place = choose_device("auto")
    try:
        profile = find_profile(target) if target else profile_of(place)
        sharding = Sharding(parallel, ranks)
        if verify and ranks > 1:
            raise ValueError("--verify runs one rank: leave --ranks out, or measure under torchrun")
        planner = functools.partial(
            Planner,
            spec,
            device=profile,
            dtype=DTYPES[dtype],
            optimizer=optimizer,
            sharding=sharding,
            blocks=blocks,
            chunked_loss=chunked_loss,
            without=without,
            also=also,
            seed=seed,
        )
        plan, plain = _find_plan(planner, budget_bytes, global_batch, microbatch, plot_path)
        measured = _measure(plan, spec, place, DTYPES[dtype], optimizer, seed) if verify else None
    except Infeasible as error:
        console.print(str(error), markup=False)
        sys.exit(1)
    except (ValueError, RuntimeError) as error:
        raise UnusableInput(_wrapped_error(error)) from error

    text = _text(plan, plain, explain=explain)
    _print_plan(console, plan, text, place=place, measured=measured, out=out)
    if json_path:
        results = {"plain_peak": plain.peak.owners, "measured_bytes": measured, "text": text}
        write_json(json_path, provenance(place) | {"plan": plan.to_json()} | results)


def _find_plan(
    planner_for: Callable[..., Planner],
    budget_bytes: int,
    global_batch: int,
    microbatch: int | None,
    plot_path: str | None,
) -> tuple[Plan, Timeline]:
    """Return the plan and the timeline of the plain step; draw the plan if `plot_path` is given.

    `planner_for` makes the planner from `tell=`, a function that shows progress.
    """
    with _progress() as show_message, planner_for(tell=show_message) as planner:
        planner.check_settings(global_batch, microbatch)
        if plot_path:
            require_matplotlib()  # after the options are checked, before the work begins

        plan = planner.plan(budget_bytes, global_batch=global_batch, microbatch=microbatch)
        show_message("what owns the peak")
        plain = planner.sketch.step(plan.microbatch, accumulated=plan.steps > 1).timeline
        if plot_path:
            show_message("drawing")
            plot_plan(planner, plan, plot_path)
    return plan, plain


def _print_plan(
    console: Console,
    plan: Plan,
    text: str,
    *,
    place: torch.device,
    measured: int | None,
    out: str | None,
) -> None:
    """Print the plan and the measured peak, and write the plan to `out`."""
    console.print(text, markup=False)
    if measured is not None:
        console.print(
            f"\nmeasured on {place}: peak {format_bytes(measured)}, "
            f"predicted {format_bytes(plan.peak_bytes)} ({plan.peak_bytes / measured:.2%})",
            markup=False,
        )
    if out:
        write_json(out, plan.to_json())
        console.print(f"\nwrote {out}: Plan.load({out!r}).apply(model)", markup=False)


def _wrapped_error(error: Exception) -> str:
    return "\n".join(textwrap.wrap(str(error), 80, break_long_words=False))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show messages with the elapsed time on a terminal; stay quiet elsewhere."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("")
        yield lambda message: progress.update(task, description=message)


def _text(plan: Plan, plain: Timeline, *, explain: bool) -> str:
    """Return the current peak with its owners and the plan, at most 80 columns wide."""
    peak = plain.peak
    owners = sorted(((held, owner) for owner, held in peak.owners.items() if held), reverse=True)
    lines = [
        f"as it is, {plan.microbatch} samples: peak {format_bytes(peak.bytes_alive)} "
        f"in {peak.phase}"
    ]
    lines += [
        f"  {owner:<20} {format_bytes(held):>10} {held / peak.bytes_alive:>6.1%}"
        for held, owner in owners
    ]
    if plan.settings["why_real"]:
        lines += textwrap.wrap(
            f"measured for real, without offload: {plan.settings['why_real']}", 80
        )
    return "\n".join([*lines, "", plan.explain(most=None if explain else 0)])


def _measure(
    plan: Plan, spec: str, place: torch.device, dtype: torch.dtype, optimizer: str, seed: int
) -> int:
    """Measure the peak of a real step of the plan, on one rank."""
    case = Case(load_workload(spec), place, dtype, batch_size=plan.microbatch, seed=seed)
    module = case.build()
    plan.apply(module)
    steps = make_optimizer(optimizer, module, foreach=place.type == "cuda")
    lives = record_step(
        module, case.batch(), case.workload.mean_loss, optimizer=steps, accumulated=plan.steps > 1
    )
    return timeline_of(lives, type(module).__name__).peak.bytes_alive
