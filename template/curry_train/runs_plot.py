"""Plot of runs from their journals: loss, dev metric, learning rate and memory.

    plot_runs([read_history("runs/run-001"), read_history("runs/run-002")], "runs.png")

Events such as saves and rollbacks are marked; steps that were rolled back are faint.
Proof: `python -m pytest tests/test_runs_plot.py`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy

from .plots import require_matplotlib
from .runs.journal_history import Course, History, Steps
from .runs.journal_lines import number_of, printable
from .runs_plot_events import SPIKE, draw_events, draw_rollbacks

# From Paul Tol's palettes for colour-blind readers; red is left to spikes.
COLOURS = (
    "#4477AA",
    "#228833",
    "#AA3377",
    "#CC8800",
    "#66CCEE",
    "#222255",
    "#999933",
    "#882255",
    "#44AA99",
    "#777777",
)
GREY = "#C4C4C4"
MOST_NAMED = 20  # runs with a colour and a name, those with the lowest last loss; others are grey
MOST_POINTS = 4000  # points of a line; beyond it, only the extremes of each stretch are drawn
FAINT = 0.45  # opacity of steps that were rolled back or resumed over
LONGEST = 30  # longest name, in characters
STYLES: tuple[Literal["-", "--"], ...] = ("-", "--")  # the second is used when colours repeat
# On a linear axis a spike is drawn up to this multiple of the range of the other losses.
SPIKE_ROOM = 5.0
LOG_FROM = 10.0  # ratio of greatest to least loss from which the axis is logarithmic


@dataclass(frozen=True)
class Look:
    """Colour, style and label of a run; `label` is None for a run that is only grey."""

    colour: str
    style: Literal["-", "--"]
    label: str | None


def plot_runs(
    histories: Sequence[History],
    path: str | Path,
    *,
    scale: str = "auto",
    smooth: int | None = None,
    title: str | None = None,
) -> list[str]:
    """Write a PNG and return the names of the runs that have a colour.

    `smooth` draws the loss as a mean over that many steps; `title` replaces the number of runs.
    """
    drawn = [history for history in histories if len(history.steps)]
    if not drawn:
        raise ValueError("there is nothing to draw: no journal has a step that counts")
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    looks = choose_looks(drawn)
    named = [(history, look) for history, look in zip(drawn, looks, strict=True) if look.label]
    metric = _metric(drawn)
    heights = [3.4, *([1.5] if metric else []), 1.0, 1.0, 0.25 + 0.14 * len(named)]
    figure = Figure(figsize=(11, sum(heights) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    loss, *others, memory, events = panels
    courses = [history.course for history in drawn]

    _draw(loss, courses, looks, "loss", smooth=smooth)
    num_not_finite = _scale_loss(loss, courses, scale)
    for history, look in named:
        draw_rollbacks(loss, history, look.colour, arrows=len(drawn) <= 4)
    _frame(loss, "loss" if smooth is None else f"loss, mean over {smooth} steps")

    if metric:
        measured = [history.metrics.get(metric) or Course(Steps(("value",))) for history in drawn]
        _draw(others[0], measured, looks, "value", marker=True)
        _frame(others[0], printable(metric, longest=20).replace("_", " "))
    _draw(others[-1], courses, looks, "learning_rate")
    _frame(others[-1], "learning rate")

    unit, size = _unit(courses)
    _draw(memory, courses, looks, "peak_bytes", divide=size)
    for axes in (others[-1], memory):
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    _frame(memory, f"peak, {unit}")

    signs = draw_events(events, [(history, look.colour, look.style) for history, look in named])
    _draw_event_legend(figure, signs, not_finite=num_not_finite > 0)
    _title(figure, drawn, looks, title)
    figure.savefig(path, format="png", dpi=130)
    return [history.name for history, _ in named]


def _draw_event_legend(figure: Any, signs: list[Any], *, not_finite: bool) -> None:
    """Explain the signs of events, losses that are not finite, and faint lines."""
    from matplotlib.lines import Line2D

    if not_finite:
        cross: dict[str, Any] = {"marker": "x", "markersize": 5, "linestyle": "none"}
        signs.append(Line2D([], [], color=SPIKE, label="loss not finite", **cross))
    if not signs:
        return
    faint: dict[str, Any] = {"color": "#444444", "alpha": FAINT, "linewidth": 1.0}
    signs.append(Line2D([], [], label="rolled back or resumed over", **faint))
    figure.legend(
        handles=signs, loc="outside lower left", ncols=len(signs), fontsize=8, frameon=False
    )


def choose_looks(histories: Sequence[History]) -> list[Look]:
    """Give each run a colour; of too many runs only those with the lowest last loss."""
    by_loss = sorted(range(len(histories)), key=lambda index: _last_loss(histories[index]))
    best = by_loss[:MOST_NAMED]
    looks = []
    number = 0
    for index, history in enumerate(histories):
        if index not in best:
            looks.append(Look(GREY, "-", None))
            continue
        colour = COLOURS[number % len(COLOURS)]
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        looks.append(Look(colour, style, shorten(history.name)))
        number += 1
    return looks


def shorten(name: str) -> str:
    """Shorten a name in its middle, because its end tells runs apart."""
    shown = printable(name)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 17]}...{shown[-14:]}"


def thinned(x: Any, y: Any) -> tuple[Any, Any]:
    """Thin out a long line to the least and greatest point of each stretch.

    The drawn line looks the same.
    """
    if len(x) <= MOST_POINTS:
        return x, y
    stretches = numpy.array_split(numpy.arange(len(x)), MOST_POINTS // 2)
    chosen = []
    for indices in stretches:
        values = y[indices]
        if numpy.isnan(values).all():
            chosen.append(indices[0])
        else:
            lowest = indices[int(numpy.nanargmin(values))]
            highest = indices[int(numpy.nanargmax(values))]
            chosen += sorted({lowest, highest})
    return x[chosen], y[chosen]


def _draw(
    axes: Any,
    courses: Sequence[Course],
    looks: Sequence[Look],
    name: str,
    *,
    smooth: int | None = None,
    divide: float = 1.0,
    marker: bool = False,
) -> None:
    draw_line = functools.partial(_line, axes, name=name, smooth=smooth, divide=divide)
    for course, look in zip(courses, looks, strict=True):
        zorder, width = (2.0, 1.2) if look.label else (1.0, 0.6)
        for steps in course.superseded:
            draw_line(steps, look=look, alpha=FAINT, linewidth=0.85 * width, zorder=zorder)
        dots: dict[str, Any] = {}
        if marker and len(course.steps) <= 100:
            dots = {"marker": "o", "markersize": 3}
        draw_line(course.steps, look=look, linewidth=width, zorder=zorder + 1, **dots)


def _line(
    axes: Any,
    steps: Steps,
    *,
    name: str,
    look: Look,
    smooth: int | None,
    divide: float,
    **options: Any,
) -> None:
    x = numpy.asarray(steps.step)
    y = numpy.asarray(steps.values[name]) / divide
    if smooth is not None and len(y) >= smooth:
        x = x[smooth - 1 :]
        y = numpy.convolve(y, numpy.full(smooth, 1 / smooth), mode="valid")
    x, y = thinned(x, numpy.where(numpy.isfinite(y), y, numpy.nan))
    axes.plot(x, y, color=look.colour, linestyle=look.style, **options)


def _scale_loss(axes: Any, courses: Sequence[Course], scale: str) -> int:
    """Set the loss axis, mark losses that are not finite, and return how many there are.

    The axis is logarithmic where losses span a decade. On a linear axis a spike leaves the picture
    rather than flatten the rest. Losses that are not finite are marked at the upper edge.
    """
    from matplotlib.ticker import LogFormatter

    losses = numpy.concatenate([numpy.asarray(course.steps.values["loss"]) for course in courses])
    finite = losses[numpy.isfinite(losses)]
    least, most = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    superseded = [
        numpy.asarray(steps.values["loss"]) for course in courses for steps in course.superseded
    ]
    if scale == "log" and least <= 0:
        raise ValueError(
            f"a loss of {least:g} can't be drawn on a logarithmic axis: use the linear one"
        )
    if scale == "log" or (scale == "auto" and least > 0 and most > LOG_FROM * least):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # 2, not 2 x 10^0
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        axes.tick_params(which="minor", labelsize=8)
    elif len(finite):
        usual = numpy.percentile(finite, 99.5)
        for values in superseded:
            most = max(most, values[numpy.isfinite(values)].max(initial=most))
        margin = 0.06 * (usual - least) or 0.05 * abs(usual) or 1.0
        top = usual if most > usual + SPIKE_ROOM * (usual - least) else most
        axes.set_ylim(least - margin, top + 2 * margin)

    not_finite = []
    for course in courses:
        for steps in (course.steps, *course.superseded):
            is_finite = numpy.isfinite(numpy.asarray(steps.values["loss"]))
            not_finite.append(numpy.asarray(steps.step)[~is_finite])
    x = numpy.concatenate(not_finite)
    edge = axes.get_xaxis_transform()
    axes.plot(x, numpy.full(len(x), 0.98), "x", color=SPIKE, markersize=5, transform=edge, zorder=5)
    return len(x)


def _frame(axes: Any, label: str) -> None:
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _title(
    figure: Any, histories: Sequence[History], looks: Sequence[Look], title: str | None
) -> None:
    from matplotlib.lines import Line2D

    if len(histories) == 1:
        only = histories[0]
        count = len(only.attempts)
        length = f"{only.steps.step[-1]:,} steps in {count} attempt{'s' if count > 1 else ''}"
        figure.suptitle(title or f"{shorten(only.name)}: {length}", x=0.01, ha="left", fontsize=11)
        return

    figure.suptitle(title or f"{len(histories)} runs", x=0.01, ha="left", fontsize=11)
    lines = [
        Line2D([], [], color=look.colour, linestyle=look.style, label=look.label)
        for look in looks
        if look.label
    ]
    if more := len(histories) - len(lines):
        lines.append(Line2D([], [], color=GREY, label=f"{more} more, which end higher"))
    figure.legend(handles=lines, loc="outside right upper", fontsize=8, frameon=False)


def _metric(histories: Sequence[History]) -> str | None:
    """Return the dev metric that most runs have."""
    counts: dict[str, int] = {}
    for history in histories:
        for name in history.metrics:
            counts[name] = counts.get(name, 0) + 1
    return max(counts, key=lambda name: counts[name]) if counts else None


def _unit(courses: Sequence[Course]) -> tuple[str, float]:
    peak = max(
        (numpy.nanmax(values) for c in courses if not numpy.isnan(values := _peaks(c)).all()),
        default=0.0,
    )
    return ("GiB", 2.0**30) if peak >= 2**30 else ("MiB", 2.0**20)


def _peaks(course: Course) -> Any:
    return numpy.asarray(course.steps.values["peak_bytes"])


def _last_loss(history: History) -> float:
    loss = number_of(history.steps.values["loss"][-1])
    return loss if loss == loss else float("inf")
