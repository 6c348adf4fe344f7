"""The picture of grad-flow: layers by probed steps, one panel each for activations, gradients and updates.

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
BAD, ABSENT, ZERO = "#E4002B", "#E8E8E8", "black"
MOST_NAMES = 60  # more names than this can't be read beside each other
DECADES = 8  # of colour; what is smaller is as dark as the smallest


def plot_flow(records: Sequence[StepFlow], path: str | Path, *, title: str = "") -> None:
    """Write a PNG. Red is a layer with infinite elements or no numbers, grey one that was not seen."""
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
        _draw(
            figure,
            axes,
            label,
            _grid(records, names, value),
            _is_bad(records, names, label),
            records,
        )
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
    """A row for each layer, a column for each record; what was not seen is no number."""
    cells = [[value(record.layers[name]) for record in records] for name in names]
    return numpy.array(
        [[math.nan if cell is None else cell for cell in row] for row in cells], dtype=float
    )


def _is_bad(records: Sequence[StepFlow], names: Sequence[str], label: str) -> Any:
    return numpy.array([[_bad(record.layers[name], label) for record in records] for name in names])


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
        lowest, highest = min(lowest, UPDATE[0]), max(highest, UPDATE[1])
    wider = max(
        1.0, math.sqrt(10 * lowest / highest)
    )  # a decade at least, so that noise does not look like a slope
    lowest, highest = lowest / wider, highest * wider
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
    """Readable without colour vision; its darkest end is left to what is exactly 0."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps["viridis"](numpy.linspace(0.15, 1.0, 256)))


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """All names, or evenly some of them where there are too many to read."""
    every = -(-len(names) // MOST_NAMES)
    places = list(range(0, len(names), every))
    size = 7 if len(names) > 30 else 8
    axes.set_yticks(places, [names[place] for place in places], fontsize=size, family="monospace")
