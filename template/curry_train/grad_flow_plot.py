"""Plot of grad-flow: layers by probed steps, with panels per quantity.

The panels show activations, gradients and updates.

Proof: `python -m pytest tests/test_grad_flow_command.py -k plot`.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from .core.flow_findings import UPDATE
from .core.flow_record import LayerFlow, Spread, StepFlow
from .plots import require_matplotlib

PANELS: tuple[tuple[str, Callable[[LayerFlow], float | None]], ...] = (
    ("activation, rms", lambda layer: _rms(layer.activation)),
    ("gradient, rms", lambda layer: _rms(layer.gradient)),
    (
        "update / weight (white lines: 1e-4, 1e-2)",
        lambda layer: None if layer.update is None else layer.update.ratio,
    ),
)
BAD = "#E4002B"
ABSENT = "#E8E8E8"
ZERO = "black"
MOST_NAMES = 60  # more names than this are unreadable beside each other
DECADES = 8  # decades of the colour scale; smaller values share its darkest colour


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
        Patch(color=BAD, label="inf or nan"),
        Patch(color=ABSENT, label="not seen"),
        Patch(color=ZERO, label="exactly 0"),
        Line2D([], [], color=BAD, marker="v", linestyle="none", label="skipped step"),
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


def _rms(spread: Spread | None) -> float | None:
    return None if spread is None else spread.rms


def _draw(
    figure: Any, axes: Any, label: str, grid: Any, bad: Any, records: Sequence[StepFlow]
) -> None:
    from matplotlib.colors import ListedColormap, LogNorm

    good = grid[numpy.isfinite(grid) & (grid > 0) & ~bad]
    highest = float(good.max()) if good.size else 1.0
    lowest = max(float(good.min()), highest / 10**DECADES) if good.size else 0.1
    if label.startswith("update"):
        lowest = min(lowest, UPDATE[0])
        highest = max(highest, UPDATE[1])
    # Span at least a decade, so that noise does not look like a slope.
    widening = max(1.0, math.sqrt(10 * lowest / highest))
    lowest /= widening
    highest *= widening

    shown = numpy.ma.masked_where(
        ~numpy.isfinite(grid) | (grid <= 0) | bad, numpy.clip(grid, lowest, None)
    )
    axes.set_facecolor(ABSENT)
    options = {"aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(shown, norm=LogNorm(lowest, highest), cmap=_colours(), **options)
    for cells, colour in ((grid == 0) & ~bad, ZERO), (bad, BAD):
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
        for bound in UPDATE:
            bar.ax.axvline(bound, color="white", linewidth=1.5)

    steps = [record.step for record in records]
    places = sorted(
        {round(place) for place in numpy.linspace(0, len(steps) - 1, min(len(steps), 6))}
    )
    axes.set_xticks(places, [str(steps[place]) for place in places], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    skipped = [index for index, record in enumerate(records) if not record.stepped]
    if skipped:
        axes.plot(skipped, [-0.5] * len(skipped), "v", color=BAD, markersize=6, clip_on=False)


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
