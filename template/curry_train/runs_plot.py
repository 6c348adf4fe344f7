"""The picture of runs, drawn from their journals: loss, dev metric, learning rate and memory over the steps, with what
happened marked.

    plot_runs([read_history("runs/run-001"), read_history("runs/run-002")], "runs.png")

What was rolled back is faint. Proof: `python -m pytest tests/test_runs_plot.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy

from .plots import require_matplotlib
from .runs.journal_history import Course, History, Steps
from .runs.journal_lines import number_of, printable
from .runs_plot_events import SPIKE, draw_events, draw_rollbacks

# Of Paul Tol's palettes for colour-blind readers; red is left to spikes.
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
MOST_NAMED = 20  # runs with a colour and a name: those that end lowest; the others are grey
MOST_POINTS = 4000  # of a line: beyond it, the least and the greatest of each stretch
FAINT = 0.45  # of what does not count any more
LONGEST = 30  # of a name
STYLES: tuple[Literal["-", "--"], ...] = ("-", "--")  # a colour comes again with the second
SPIKE_ROOM = 5.0  # of a linear axis for spikes, over what the rest takes; beyond it they are marked at the edge
LOG_FROM = 10.0  # greatest over least loss, above which the axis is logarithmic


@dataclass(frozen=True)
class Look:
    """How a run is drawn; `label` is None where it is one of many."""

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
    """Write a PNG; returns the names of the runs that have a colour. `smooth` draws means over so many steps;
    `title` is over it instead of how many they are."""
    drawn = [history for history in histories if len(history.steps)]
    if not drawn:
        raise ValueError("there is nothing to draw: no journal has a step that counts")
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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
    lost = _scale_loss(loss, courses, scale)
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
    if lost:
        signs.append(
            Line2D(
                [],
                [],
                color=SPIKE,
                marker="x",
                markersize=5,
                linestyle="none",
                label="loss not finite",
            )
        )
    if signs:
        signs.append(
            Line2D(
                [],
                [],
                color="#444444",
                alpha=FAINT,
                linewidth=1.0,
                label="rolled back or resumed over",
            )
        )
        figure.legend(
            handles=signs, loc="outside lower left", ncols=len(signs), fontsize=8, frameon=False
        )
    _title(figure, drawn, looks, title)
    figure.savefig(path, format="png", dpi=130)
    return [history.name for history, _ in named]


def choose_looks(histories: Sequence[History]) -> list[Look]:
    """A colour for each, and for the best ones alone where they are too many to tell apart."""
    best = sorted(range(len(histories)), key=lambda place: _last_loss(histories[place]))[
        :MOST_NAMED
    ]
    looks, number = [], 0
    for place, history in enumerate(histories):
        if place not in best:
            looks.append(Look(GREY, "-", None))
            continue
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        looks.append(Look(colour, style, shorten(history.name)))
        number += 1
    return looks


def shorten(name: str) -> str:
    """The end of a name says more than its middle."""
    shown = printable(name)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 17]}...{shown[-14:]}"


def thinned(x: Any, y: Any) -> tuple[Any, Any]:
    """The same line to the eye: of each stretch its least and its greatest figure, in their order."""
    if len(x) <= MOST_POINTS:
        return x, y
    stretches = numpy.array_split(numpy.arange(len(x)), MOST_POINTS // 2)
    kept = []
    for places in stretches:
        part = y[places]
        if numpy.isnan(part).all():
            kept.append(places[0])
        else:
            kept += sorted({places[int(numpy.nanargmin(part))], places[int(numpy.nanargmax(part))]})
    return x[kept], y[kept]


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
    for course, look in zip(courses, looks, strict=True):
        back, width = (2.0, 1.2) if look.label else (1.0, 0.6)
        for steps in course.superseded:
            _line(
                axes,
                steps,
                name,
                look,
                smooth,
                divide,
                alpha=FAINT,
                linewidth=0.85 * width,
                zorder=back,
            )
        dots = {"marker": "o", "markersize": 3} if marker and len(course.steps) <= 100 else {}
        _line(
            axes, course.steps, name, look, smooth, divide, linewidth=width, zorder=back + 1, **dots
        )


def _line(
    axes: Any,
    steps: Steps,
    name: str,
    look: Look,
    smooth: int | None,
    divide: float,
    **options: Any,
) -> None:
    x, y = numpy.asarray(steps.step), numpy.asarray(steps.values[name]) / divide
    if smooth is not None and len(y) >= smooth:
        x, y = x[smooth - 1 :], numpy.convolve(y, numpy.full(smooth, 1 / smooth), mode="valid")
    x, y = thinned(x, numpy.where(numpy.isfinite(y), y, numpy.nan))
    axes.plot(x, y, color=look.colour, linestyle=look.style, **options)


def _scale_loss(axes: Any, courses: Sequence[Course], scale: str) -> int:
    """Logarithmic where losses span a decade; linear, a spike goes out of the picture rather than flatten the rest.

    Losses that are not finite are marked at the upper edge; returns how many there are.
    """
    from matplotlib.ticker import LogFormatter

    losses = numpy.concatenate([numpy.asarray(course.steps.values["loss"]) for course in courses])
    known = losses[numpy.isfinite(losses)]
    least, most = (known.min(), known.max()) if len(known) else (0.0, 1.0)
    given_up = [
        numpy.asarray(steps.values["loss"]) for course in courses for steps in course.superseded
    ]
    if scale == "log" and least <= 0:
        raise ValueError(
            f"a loss of {least:g} has no place on a logarithmic axis: take the linear one"
        )
    if scale == "log" or (scale == "auto" and least > 0 and most > LOG_FROM * least):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # 2, not 2 x 10^0
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        axes.tick_params(which="minor", labelsize=8)
    elif len(known):
        usual = numpy.percentile(known, 99.5)
        most = max(
            [most, *(values[numpy.isfinite(values)].max(initial=most) for values in given_up)]
        )
        room = 0.06 * (usual - least) or 0.05 * abs(usual) or 1.0
        axes.set_ylim(
            least - room,
            (usual if most > usual + SPIKE_ROOM * (usual - least) else most) + 2 * room,
        )
    parts = [steps for course in courses for steps in (course.steps, *course.superseded)]
    lost = [
        numpy.asarray(steps.step)[~numpy.isfinite(numpy.asarray(steps.values["loss"]))]
        for steps in parts
    ]
    x = numpy.concatenate(lost)
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
        only, count = histories[0], len(histories[0].attempts)
        told = f"{only.steps.step[-1]:,} steps in {count} attempt{'s' if count > 1 else ''}"
        figure.suptitle(title or f"{shorten(only.name)}: {told}", x=0.01, ha="left", fontsize=11)
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
    """The dev metric that most of them have."""
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
