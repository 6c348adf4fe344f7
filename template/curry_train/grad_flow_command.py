"""Command `grad-flow`: train briefly and report how gradients and activations flow.

    python -m curry_train grad-flow --model transformer

Proof: `python -m pytest tests/test_grad_flow_command.py`.
"""

import sys
from dataclasses import replace

import click
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from .core.load import load_workload
from .core.provenance import provenance, write_json
from .core.untouched import seeded
from .core.workload import Case
from .grad_flow_plot import plot_flow
from .options import (
    DTYPES,
    UnusableInput,
    choose_device,
    model_option,
    plot_option,
    run_options,
    samples_of,
)
from .plan.strategies import STRATEGIES, Sample
from .plots import require_matplotlib
from .primitives.grad_flow import RECOMPUTE, GradFlow


@click.command("grad-flow")
@model_option("spec", required=True)
@run_options
@click.option(
    "--steps",
    default=20,
    type=click.IntRange(1),
    show_default=True,
    help="Optimizer steps to train.",
)
@click.option(
    "--every",
    default=1,
    type=click.IntRange(1),
    show_default=True,
    help="Steps from one probe to the next.",
)
@click.option(
    "--microbatches",
    default=1,
    type=click.IntRange(1),
    show_default=True,
    help="Microbatches per step.",
)
@click.option(
    "--learning-rate", default=1e-3, type=click.FloatRange(0, min_open=True), show_default=True
)
@click.option(
    "--clip-norm",
    type=click.FloatRange(0, min_open=True),
    help="Clip gradients to this norm, after the probe.",
)
@click.option(
    "--layers",
    multiple=True,
    metavar="PATTERN",
    help="Layers to probe, a glob over module names. Repeatable.",
)
@click.option(
    "--strategy",
    default="none",
    type=click.Choice(list(STRATEGIES)),
    show_default=True,
    help="Strategy that saves memory.",
)
@click.option(
    "--recompute",
    default="filter",
    type=click.Choice(RECOMPUTE),
    show_default=True,
    help="In probed steps: skip the recomputed forward (filter), or recompute nothing (off).",
)
@plot_option("Draw layers by steps as PNG; needs matplotlib.")
def grad_flow_command(
    spec: str,
    blocks: str | None,
    device: str,
    dtype: str,
    batch_size: int | None,
    seed: int,
    json_path: str | None,
    steps: int,
    every: int,
    microbatches: int,
    learning_rate: float,
    clip_norm: float | None,
    layers: tuple[str, ...],
    strategy: str,
    recompute: str,
    plot_path: str | None,
) -> None:
    """Train and report unhealthy layers.

    Trains with AdamW and reports layers that are not finite, dead, or without gradient.

    Exit status: 0 all values finite, 1 some were not (the first layer is named), 2 wrong usage,
    3 device not available. Findings such as a dead layer are reported but are no failure.
    """
    place = choose_device(device)
    try:
        workload = load_workload(spec)
        size = samples_of(workload, batch_size)
        case = Case(workload, place, DTYPES[dtype], batch_size=size, seed=seed, blocks=blocks)
        module = case.build()
        STRATEGIES[strategy].apply(module, Sample(case.batch(), case.workload.mean_loss, blocks))
        optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
        flow = GradFlow(
            module,
            optimizer,
            every=every,
            layers=list(layers) or None,
            blocks=blocks,
            recompute=recompute,
        )
        if plot_path:
            require_matplotlib()  # after the options are checked, before the work begins
        losses = _train(case, module, optimizer, flow, steps, microbatches, clip_norm)
    except (ValueError, RuntimeError) as error:
        raise UnusableInput(str(error)) from error

    click.echo(flow.table(), err=json_path == "-")
    facts = provenance(place)
    if plot_path:
        title = f"{case.workload.name}, {dtype}, {facts['device']}, torch {facts['torch']}"
        plot_flow(flow.records, plot_path, title=title)
    if json_path:
        facts |= {"workload": case.workload.name, "dtype": dtype, "batch_size": size}
        facts |= {"seed": seed, "strategy": strategy, "learning_rate": learning_rate}
        write_json(json_path, facts | {"losses": losses} | flow.to_json())
    if any(record.nonfinite for record in flow.records):
        sys.exit(1)


def _train(
    case: Case,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    flow: GradFlow,
    steps: int,
    microbatches: int,
    clip_norm: float | None,
) -> list[float | str]:
    """Train with a new batch for each microbatch and return the loss of each step.

    A loss that is not finite is returned as text, such as "nan".
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    console = Console(stderr=True)
    losses = []
    with (
        Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress,
        seeded(case.seed),
        flow,
    ):
        task = progress.add_task("training", total=steps)
        for step in range(steps):
            optimizer.zero_grad()
            total = torch.zeros((), device=case.device)
            for index in range(microbatches):
                batch = replace(case, seed=case.seed + step * microbatches + index).batch()
                loss = case.workload.mean_loss(module, batch) / microbatches
                loss.backward()
                total += loss.detach()
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
            optimizer.step()
            losses.append(total.item())
            progress.advance(task)
    return [loss if torch.tensor(loss).isfinite() else str(loss) for loss in losses]
