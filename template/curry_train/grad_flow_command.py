"""The command that trains a model for some steps and says how gradients and activations flow through it: `python -m
curry_train grad-flow`.

Proof: `python -m pytest tests/test_grad_flow_command.py`.
"""

import sys
from dataclasses import replace
from typing import Any

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
    help="Probe every so many steps.",
)
@click.option(
    "--microbatches", default=1, type=click.IntRange(1), show_default=True, help="For each step."
)
@click.option(
    "--learning-rate", default=1e-3, type=click.FloatRange(0, min_open=True), show_default=True
)
@click.option(
    "--clip-norm",
    type=click.FloatRange(0, min_open=True),
    help="Clip gradients, after they were read.",
)
@click.option(
    "--layers", multiple=True, metavar="PATTERN", help="Globs over module names; repeatable."
)
@click.option(
    "--strategy",
    default="none",
    type=click.Choice(list(STRATEGIES)),
    show_default=True,
    help="Way to save memory.",
)
@click.option("--recompute", default="filter", type=click.Choice(RECOMPUTE), show_default=True)
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
    """Train with AdamW, and say which layer is not finite, dead, or gets no gradient.

    Exit status: 0 all was finite, 1 something was not (the first layer is named), 2 wrong usage, 3 no such device.
    What is only unusual, such as a dead layer, is said and is no failure.
    """
    place = choose_device(device)
    try:
        workload = load_workload(spec)
        size = samples_of(workload, batch_size)
        case = Case(workload, place, DTYPES[dtype], batch_size=size, seed=seed, blocks=blocks)
        module = case.build()
        STRATEGIES[strategy].apply(module, Sample(case.batch(), case.workload.mean_loss, blocks))
        optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
        chosen: dict[str, Any] = {
            "layers": list(layers) or None,
            "blocks": blocks,
            "recompute": recompute,
        }
        flow = GradFlow(module, optimizer, every=every, **chosen)
        if plot_path:
            require_matplotlib()  # after what is wrong with the options, and before the work
        losses = _train(case, module, optimizer, flow, steps, microbatches, clip_norm)
    except (ValueError, RuntimeError) as error:
        raise UnusableInput(str(error)) from error
    click.echo(flow.table(), err=json_path == "-")
    if plot_path:
        facts = provenance(place)
        title = f"{case.workload.name}, {dtype}, {facts['device']}, torch {facts['torch']}"
        plot_flow(flow.records, plot_path, title=title)
    if json_path:
        facts = provenance(place) | {
            "workload": case.workload.name,
            "dtype": dtype,
            "batch_size": size,
        }
        settings = {
            "seed": seed,
            "strategy": strategy,
            "learning_rate": learning_rate,
            "losses": losses,
        }
        write_json(json_path, facts | settings | flow.to_json())
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
    """The loss of each step, a batch of its own for each microbatch; a word where it is no number."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    console, losses = Console(stderr=True), []
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
