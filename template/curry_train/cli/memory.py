"""The memory command: bytes that each layer holds, owners of the peak, and the timeline.

Proof: `python -m pytest tests/plan/test_timeline.py`.
"""

import contextlib
from pathlib import Path
from typing import Any

import click

from ..core.blocks import NoBlocks, find_blocks
from ..core.wording import format_mebibytes, provenance, write_json
from ..plan.profiler import BYTES_PER_MIB, STEP_PHASES, MemoryProfiler, Timeline
from ..plan.timeline import measure_timeline
from ..workloads.models import load_workload
from ..workloads.workload import Case
from .options import (
    DTYPES,
    UnusableInput,
    blocks_text,
    choose_device,
    model_option,
    plot_option,
    require_matplotlib,
    run_options,
    samples_of,
    settle_blocks,
)
from .screen import ScreenCommand

# From Paul Tol's palette for colour-blind readers. Bytes that live through the whole step are at
# the bottom, in grey or blue.
GROUP_COLOURS = {
    "parameters": "#BBBBBB",
    "buffers and batch": "#DDDDDD",
    "optimizer state": "#77AADD",
    "gradients": "#44BB99",
    "activations": "#EE8866",
    "temporaries": "#EEDD88",
    "allocator": "#FFAABB",
}


PHASE_SHADES = {"forward": "#F4F4F4", "backward": "#FFFFFF", "step": "#F4F4F4"}


def plot_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a PNG: bytes alive by owner over the operations of a step, and at its peak."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    course_axes, owner_axes = figure.subplots(1, 2, width_ratios=(2.7, 1))
    figure.suptitle(
        f"{timeline.model} on {timeline.device}: one training step with {timeline.optimizer}",
        x=0.01,
        ha="left",
    )
    _draw_course(course_axes, timeline)
    _draw_owners(owner_axes, timeline)
    figure.savefig(path, format="png", dpi=150)


def _draw_course(axes: Any, timeline: Timeline) -> None:
    places = [point.index for point in timeline.points]
    shown = [group for group in GROUP_COLOURS if any(timeline.owners.get(group, ()))]
    layers = []
    for group in shown:
        layers.append([owned / BYTES_PER_MIB for owned in timeline.owners[group]])
    peak = timeline.peak
    highest = peak.bytes_alive / BYTES_PER_MIB
    axes.stackplot(
        places,
        layers,
        colors=[GROUP_COLOURS[group] for group in shown],
        step="post",
        linewidth=0,
        zorder=2,
    )
    axes.set_xlim(0, timeline.num_operations - 1)
    axes.set_ylim(0, highest * 1.22)

    start = 0
    for phase in STEP_PHASES:
        end = max(point.index for point in timeline.points if point.phase == phase)
        axes.axvspan(start, end, color=PHASE_SHADES[phase], zorder=0)
        axes.axvline(end, color="#666666", linewidth=0.6, linestyle=":", zorder=3)
        axes.text(
            (start + end) / 2,
            highest * 1.19,
            phase,
            ha="center",
            va="top",
            fontsize=9,
            color="#333333",
        )
        start = end

    left = peak.index < timeline.num_operations / 2
    axes.plot(
        [peak.index], [highest], marker="v", color="black", markersize=6, zorder=4, clip_on=False
    )
    axes.annotate(
        f"peak {format_mebibytes(peak.bytes_alive)} MiB, {peak.phase}",
        (peak.index, highest),
        xytext=(8 if left else -8, 4),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom",
        fontsize=9,
        fontweight="bold",
    )
    axes.set_xlabel("operation")
    axes.set_ylabel("MiB alive")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_owners(axes: Any, timeline: Timeline) -> None:
    """Draw a bar for each owner, in the stacking order of the course."""
    owned = {
        group: timeline.peak.owners[group]
        for group in GROUP_COLOURS
        if any(timeline.owners.get(group, ()))
    }
    widths = [held / BYTES_PER_MIB for held in owned.values()]
    longest = max(widths)
    colours = [GROUP_COLOURS[group] for group in owned]

    # A colour key at the left, for owners whose bar is too short to show its colour.
    axes.barh(list(owned), 0.04 * longest, left=-0.08 * longest, height=0.3, color=colours)
    bars = axes.barh(list(owned), widths, color=colours)
    whole = timeline.peak.bytes_alive
    labels = [f"{format_mebibytes(held)}  ({held / whole:.0%})" for held in owned.values()]
    axes.bar_label(bars, labels, padding=3, fontsize=9)
    axes.set_xlim(-0.1 * longest, 1.55 * longest)
    axes.set_title("MiB at the peak, by owner", fontsize=10, loc="left")
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)


@click.command("memory", cls=ScreenCommand, example="--model transformer --plot memory.png")
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
    """Show what holds the memory of a training step.

    Prints the bytes that each layer holds, and the owners of the peak.

    Exit status: 0 measured, 2 wrong usage, 3 device not available.
    """
    place = choose_device(device)
    try:
        workload = load_workload(spec)
        size = samples_of(workload, batch_size)
        case = Case(workload, place, DTYPES[dtype], batch_size=size, seed=seed, blocks=blocks)
        module = case.build()
        batch = case.batch()
        if plot_path:
            # A wrong pattern is reported before a missing package.
            with contextlib.suppress(NoBlocks):
                find_blocks(module, blocks)
            require_matplotlib()
        case, choice = settle_blocks(case)
        loss = case.workload.mean_loss
        profile = MemoryProfiler(module).profile(batch, loss=loss, blocks=case.blocks)
        timeline = measure_timeline(module, batch, loss, blocks=case.blocks)
    except (ValueError, RuntimeError) as error:
        raise UnusableInput(str(error)) from error

    facts = provenance(place)
    header = f"{facts['device']}, torch {facts['torch']}, {dtype}, batch size {size}, seed {seed}"
    tables = (header, blocks_text(choice), profile.table(), timeline.table())
    click.echo("\n\n".join(tables), err=json_path == "-")
    if plot_path:
        plot_timeline(timeline, plot_path)
    if json_path:
        facts |= {"workload": case.workload.name, "dtype": dtype, "batch_size": size}
        results = {"profile": profile.to_json(), "timeline": timeline.to_json()}
        write_json(json_path, facts | {"seed": seed, "blocks": choice.to_json()} | results)
