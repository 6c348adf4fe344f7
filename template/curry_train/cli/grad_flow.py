"""The grad-flow command: its table and heat map.

The panels show activations, gradients and updates.

Proof: `python -m pytest tests/cli/test_grad_flow_command.py`.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy
import torch

from ..core.rerun import seeded
from ..core.wording import provenance, write_json
from ..primitives.grad_flow import RECOMPUTE_MODES, GradFlow, LayerFlow, StepFlow, ValueSpread
from ..primitives.grad_flow_report import UPDATE_RATIO_RANGE, flow_json, flow_table
from ..primitives.strategies import STRATEGIES, Sample
from ..workloads.models import is_taken, load_workload
from ..workloads.workload import Case, Workload
from .options import (
    UnusableInput,
    case_of,
    choose_device,
    dtype_name,
    echo_notes,
    plot_option,
    require_matplotlib,
    run_options,
    settle_blocks,
    training_options,
)
from .screen import ScreenCommand, progress_on_screen

# Plot of grad-flow: layers by probed steps, with panels per quantity.

PANELS: tuple[tuple[str, Callable[[LayerFlow], float | None]], ...] = (
    ("activation, rms", lambda layer: _rms(layer.activation)),
    ("gradient, rms", lambda layer: _rms(layer.gradient)),
    (
        "update / weight (white lines: 1e-4, 1e-2)",
        lambda layer: None if layer.update is None else layer.update.ratio,
    ),
)
NONFINITE_COLOUR = "#E4002B"
NOT_SEEN_COLOUR = "#E8E8E8"
ZERO_COLOUR = "black"
MOST_NAMES = 60  # more names than this are unreadable beside each other
COLOUR_DECADES = 8  # decades of the colour scale; smaller values share its darkest colour


def plot_flow(records: Sequence[StepFlow], path: str | Path, *, title: str = "") -> None:
    """Write a PNG: red marks inf or nan in a layer, grey a layer that was not called."""
    if not records:
        raise ValueError("no step was probed, so there is nothing to draw")
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = list(records[-1].layers)
    height = min(22.0, max(3.4, 1.8 + 0.17 * len(names)))
    longest = max(map(len, names))
    figure = Figure(figsize=(11 + 0.07 * longest, height), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (label, value) in zip(panels, PANELS, strict=True):
        grid = _grid(records, names, value)
        bad = _is_bad(records, names, label)
        _draw(figure, axes, label, grid, bad, records)
    _name_rows(panels[0], names)

    legend: list[Any] = [
        Patch(color=NONFINITE_COLOUR, label="inf or nan"),
        Patch(color=NOT_SEEN_COLOUR, label="not seen"),
        Patch(color=ZERO_COLOUR, label="exactly 0"),
        Line2D([], [], color=NONFINITE_COLOUR, marker="v", linestyle="none", label="skipped step"),
    ]
    figure.legend(handles=legend, loc="outside lower right", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(title or "layers by steps", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, format="png", dpi=120)


def _grid(
    records: Sequence[StepFlow], names: Sequence[str], value: Callable[[LayerFlow], float | None]
) -> Any:
    """Return values with a row per layer and a column per record; NaN where there is none."""
    grid = numpy.full((len(names), len(records)), math.nan)
    for row, name in enumerate(names):
        for column, record in enumerate(records):
            cell = value(record.layers[name])
            if cell is not None:
                grid[row, column] = cell
    return grid


def _is_bad(records: Sequence[StepFlow], names: Sequence[str], label: str) -> Any:
    bad = numpy.zeros((len(names), len(records)), dtype=bool)
    for row, name in enumerate(names):
        for column, record in enumerate(records):
            bad[row, column] = _bad(record.layers[name], label)
    return bad


def _bad(layer: LayerFlow, label: str) -> bool:
    if label.startswith("update"):
        return layer.update is not None and not math.isfinite(
            layer.update.distance + layer.update.weight_norm
        )
    spread = layer.activation if label.startswith("activation") else layer.gradient
    return spread is not None and spread.nonfinite > 0


def _rms(spread: ValueSpread | None) -> float | None:
    return None if spread is None else spread.rms


def _draw(
    figure: Any, axes: Any, label: str, grid: Any, bad: Any, records: Sequence[StepFlow]
) -> None:
    from matplotlib.colors import ListedColormap, LogNorm

    good = grid[numpy.isfinite(grid) & (grid > 0) & ~bad]
    highest = float(good.max()) if good.size else 1.0
    lowest = max(float(good.min()), highest / 10**COLOUR_DECADES) if good.size else 0.1
    if label.startswith("update"):
        lowest = min(lowest, UPDATE_RATIO_RANGE[0])
        highest = max(highest, UPDATE_RATIO_RANGE[1])
    # Span at least a decade, so that noise does not look like a slope.
    widening = max(1.0, math.sqrt(10 * lowest / highest))
    lowest /= widening
    highest *= widening

    shown = numpy.ma.masked_where(
        ~numpy.isfinite(grid) | (grid <= 0) | bad, numpy.clip(grid, lowest, None)
    )
    axes.set_facecolor(NOT_SEEN_COLOUR)
    options = {"aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(shown, norm=LogNorm(lowest, highest), cmap=_colours(), **options)
    for cells, colour in ((grid == 0) & ~bad, ZERO_COLOUR), (bad, NONFINITE_COLOUR):
        if cells.any():
            axes.imshow(
                numpy.ma.masked_where(~cells, cells), cmap=ListedColormap([colour]), **options
            )

    bar = figure.colorbar(image, ax=axes, location="top", shrink=0.9, pad=0.01, aspect=30)
    bar.set_label(label, fontsize=10)
    bar.ax.tick_params(labelsize=8)
    bar.minorticks_off()
    ticks = numpy.geomspace(lowest, highest, 4)
    bar.set_ticks(ticks, labels=[f"{tick:.0e}" for tick in ticks])
    if label.startswith("update"):
        for bound in UPDATE_RATIO_RANGE:
            bar.ax.axvline(bound, color="white", linewidth=1.5)

    steps = [record.step for record in records]
    places = sorted(
        {round(place) for place in numpy.linspace(0, len(steps) - 1, min(len(steps), 6))}
    )
    axes.set_xticks(places, [str(steps[place]) for place in places], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    skipped = [index for index, record in enumerate(records) if not record.stepped]
    if skipped:
        axes.plot(
            skipped, [-0.5] * len(skipped), "v", color=NONFINITE_COLOUR, markersize=6, clip_on=False
        )


def _colours() -> Any:
    """Return viridis without its darkest end, which is left to values that are exactly 0.

    The colours can be told apart without colour vision.
    """
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps["viridis"](numpy.linspace(0.15, 1.0, 256)))


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """Label all rows, or an even selection where there are too many to read."""
    every = -(-len(names) // MOST_NAMES)
    places = list(range(0, len(names), every))
    size = 7 if len(names) > 30 else 8
    axes.set_yticks(places, [names[place] for place in places], fontsize=size, family="monospace")


DEFAULT_LEARNING_RATE = 1e-3

# Command `grad-flow`: train briefly and report how gradients and activations flow.


LOOP_NOT_RUN = "\nyour loop was not run: these steps train the model with the loss read off it"


@click.command("grad-flow", cls=ScreenCommand, example="--model transformer --plot flow.png")
@training_options("spec")
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
    "--learning-rate",
    type=click.FloatRange(0, min_open=True),
    metavar="RATE",
    help="Constant rate of AdamW; default: the trainer's optimizer, or 1e-3.",
)
@click.option(
    "--clip-norm",
    type=click.FloatRange(0, min_open=True),
    metavar="NORM",
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
    metavar="NAME",
    show_default=True,
    help=f"Strategy that saves memory: {', '.join(STRATEGIES)}.",
)
@click.option(
    "--recompute",
    default="filter",
    type=click.Choice(RECOMPUTE_MODES),
    help="Probe the first forward only, or turn recompute off.",
)
@plot_option("Draw layers by steps as PNG; needs matplotlib.")
def grad_flow_command(
    spec: str,
    blocks: str | None,
    device: str,
    dtype: str | None,
    batch_size: int | None,
    seed: int,
    json_path: str | None,
    steps: int,
    every: int,
    microbatches: int,
    learning_rate: float | None,
    clip_norm: float | None,
    layers: tuple[str, ...],
    strategy: str,
    recompute: str,
    plot_path: str | None,
) -> None:
    """Train a few steps and report unhealthy layers.

    Exit status: 0 all values finite, 1 some were not (the first layer is named), 2 wrong usage,
    3 device not available. A dead layer is reported but is no failure.
    """
    place = choose_device(device)
    try:
        workload = load_workload(spec)
        case = case_of(workload, place, dtype, batch_size, seed, blocks)
        case, _ = settle_blocks(case)
        module = case.build()
        sample = Sample(case.batch(), case.workload.mean_loss, case.blocks)
        STRATEGIES[strategy].apply(module, sample)
        optimizer = _optimizer(workload, module, learning_rate)
        flow = GradFlow(
            module,
            optimizer,
            every=every,
            layers=list(layers) or None,
            blocks=case.blocks,
            recompute=recompute,
        )
        if plot_path:
            require_matplotlib()  # after the options are checked, before the work begins
        losses = _train(case, module, optimizer, flow, steps, microbatches, clip_norm)
    except (ValueError, RuntimeError) as error:
        raise UnusableInput(str(error)) from error

    echo_notes(workload, err=json_path == "-")
    click.echo(flow_table(flow.records) + LOOP_NOT_RUN * is_taken(spec), err=json_path == "-")
    facts = provenance(place)
    dtype = dtype_name(case.dtype)
    if plot_path:
        title = f"{case.workload.name}, {dtype}, {facts['device']}, torch {facts['torch']}"
        plot_flow(flow.records, plot_path, title=title)
    if json_path:
        facts |= {"workload": case.workload.name, "dtype": dtype, "batch_size": case.batch_size}
        facts |= {"seed": seed, "strategy": strategy}
        facts |= {"learning_rate": optimizer.param_groups[0]["lr"]}
        write_json(json_path, facts | {"losses": losses} | flow_json(flow))
    if any(record.nonfinite for record in flow.records):
        sys.exit(1)


def _optimizer(
    workload: Workload, module: torch.nn.Module, rate: float | None
) -> torch.optim.Optimizer:
    """Make AdamW with a learning rate, or the workload's own optimizer where none was given."""
    if workload.optimizer is None or rate is not None:
        return torch.optim.AdamW(module.parameters(), lr=rate or DEFAULT_LEARNING_RATE)
    optimizer = workload.optimizer(module)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS runs the model inside of its step: give --learning-rate for AdamW")
    return optimizer


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
    losses = []
    with (
        progress_on_screen() as progress,
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
