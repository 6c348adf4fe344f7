"""The picture of runs: losses, events and memory from their journals.

plot_runs([read_history("runs/run-001"), read_history("runs/run-002")], "runs.png")

Events such as saves and rollbacks are marked; steps that were rolled back are faint.

Proof: `python -m pytest tests/cli/test_runs_plot.py`.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import numpy

from ..core.wording import write_json
from ..runs.history import Course, History, Steps, read_history
from ..runs.journal import Event, event_number, find_journal, finite, printable
from ..runs.ranks import RunError
from .options import UnusableInput, json_option, output_option, require_matplotlib
from .screen import ScreenCommand

# Events in the plot of runs: a row of marks per run, spikes and rollbacks at the loss.

SPIKE_COLOUR = "#EE6677"
EVENT_MARKERS = {  # marker and size of each kind of event
    "save": ("|", 7),
    "resume": (">", 5),
    "rollback": ("<", 6),
    "spike": ("v", 6),
    "skip": ("x", 5),
    "warning": ("d", 5),
    "stop": ("s", 4),
}
MOST_SAVES = 200  # marks of a kind drawn per run, evenly chosen; more would merge into a bar


def draw_events(axes: Any, runs: Sequence[tuple[History, str, str]]) -> list[Any]:
    """Draw a row of events per run in its colour and style; return legend handles."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    drawn_kinds = []
    for kind, (sign, size) in EVENT_MARKERS.items():
        for row, (history, colour, _) in enumerate(runs):
            if kind not in history.marks:
                continue
            steps = numpy.array(history.marks[kind].step)
            if len(steps) > MOST_SAVES:
                steps = steps[numpy.linspace(0, len(steps) - 1, MOST_SAVES).astype(int)]
            shown = SPIKE_COLOUR if kind == "spike" else colour
            look = {"marker": sign, "markersize": size, "color": shown, "linestyle": "none"}
            axes.plot(steps, numpy.full(len(steps), row), clip_on=False, zorder=3, **look)
            drawn_kinds.append(kind)
    for row, (_, colour, style) in enumerate(runs):
        axes.axhline(row, color=colour, linestyle=style, linewidth=0.7, alpha=0.4, zorder=1)

    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_yticks([])
    axes.set_ylabel("events", fontsize=9)
    axes.set_xlabel("step", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)

    handles = []
    for kind in dict.fromkeys(drawn_kinds):
        sign, size = EVENT_MARKERS[kind]
        shown = SPIKE_COLOUR if kind == "spike" else "#444444"
        handles.append(
            Line2D([], [], color=shown, marker=sign, markersize=size, linestyle="none", label=kind)
        )
    return handles


def draw_rollbacks(axes: Any, history: History, colour: str, *, arrows: bool) -> None:
    """Draw spikes at their loss, and an arrow from the start to the target of each rollback."""
    for event in history.marks["spike"].events if "spike" in history.marks else []:
        _mark(axes, event.step, loss_at(history, event), sign="v", colour=SPIKE_COLOUR)
    for event in history.marks["rollback"].events if "rollback" in history.marks else []:
        from_step = event.facts.get("from_step")
        if type(from_step) is not int:
            continue
        before = loss_at(history, event._replace(step=from_step, attempt=event.attempt - 1))
        after = loss_at(history, event)
        _mark(axes, event.step, after, sign="<", colour=colour)
        if arrows and before is not None and after is not None:
            style = {
                "arrowstyle": "-|>",
                "color": colour,
                "linewidth": 0.9,
                "connectionstyle": "arc3,rad=0.3",
            }
            before = min(before, axes.get_ylim()[1])
            axes.annotate(
                "",
                (event.step, after),
                (from_step, before),
                arrowprops=style,
                annotation_clip=False,
            )


def _mark(axes: Any, step: int, loss: float | None, *, sign: str, colour: str) -> None:
    """Mark a loss, or the upper edge where it is unknown or outside the picture."""
    low, high = axes.get_ylim()
    inside = loss is not None and low <= loss <= high
    y = loss if inside else 0.97
    where = {} if inside else {"transform": axes.get_xaxis_transform()}
    look = {"color": colour, "markersize": 7, "markeredgecolor": "white", "zorder": 6}
    axes.plot([step], [y], sign, **look, **where)


def loss_at(history: History, event: Event) -> float | None:
    """Return the loss of the event's attempt at its step, even if that step was rolled back."""
    for steps in (*reversed(history.course.superseded), history.steps):
        index = bisect_left(steps.step, event.step)
        if (
            index < len(steps)
            and steps.step[index] == event.step
            and steps.attempt[index] <= event.attempt
        ):
            loss = steps.values["loss"][index]
            return loss if math.isfinite(loss) else None
    recorded = event_number(event.facts.get("loss"))
    return recorded if math.isfinite(recorded) else None


# Plot of runs from their journals: loss, dev metric, learning rate and memory.

# From Paul Tol's palettes for colour-blind readers; red is left to spikes.
RUN_COLOURS = (
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
OTHER_RUNS_COLOUR = "#C4C4C4"
MOST_NAMED = 20  # runs with a colour and a name, those with the lowest last loss; others are grey
MOST_POINTS = 4000  # points of a line; beyond it, only the extremes of each stretch are drawn
FAINT_OPACITY = 0.45  # opacity of steps that were rolled back or resumed over
LONGEST_RUN_NAME = 30  # longest name, in characters
LINE_STYLES: tuple[Literal["-", "--"], ...] = ("-", "--")  # the second is used when colours repeat
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
        signs.append(Line2D([], [], color=SPIKE_COLOUR, label="loss not finite", **cross))
    if not signs:
        return
    faint: dict[str, Any] = {"color": "#444444", "alpha": FAINT_OPACITY, "linewidth": 1.0}
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
            looks.append(Look(OTHER_RUNS_COLOUR, "-", None))
            continue
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        style = LINE_STYLES[number // len(RUN_COLOURS) % len(LINE_STYLES)]
        looks.append(Look(colour, style, shorten(history.name)))
        number += 1
    return looks


def shorten(name: str) -> str:
    """Shorten a name in its middle, because its end tells runs apart."""
    shown = printable(name)
    return (
        shown
        if len(shown) <= LONGEST_RUN_NAME
        else f"{shown[: LONGEST_RUN_NAME - 17]}...{shown[-14:]}"
    )


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
            draw_line(steps, look=look, alpha=FAINT_OPACITY, linewidth=0.85 * width, zorder=zorder)
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
    axes.plot(
        x, numpy.full(len(x), 0.98), "x", color=SPIKE_COLOUR, markersize=5, transform=edge, zorder=5
    )
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
        lines.append(
            Line2D([], [], color=OTHER_RUNS_COLOUR, label=f"{more} more, which end higher")
        )
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
    loss = event_number(history.steps.values["loss"][-1])
    return loss if loss == loss else float("inf")


# Command `runs plot`: draw runs from their journals.


@click.command("plot", cls=ScreenCommand, example="run-001 --out run.png")
@click.argument("names", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--runs",
    "root",
    default="runs",
    show_default=True,
    metavar="DIR",
    help="Folder of the runs given by name.",
)
@output_option("Write this PNG.", "--out", default="runs.png", show_default=True)
@click.option(
    "--scale",
    type=click.Choice(["auto", "log", "linear"]),
    default="auto",
    show_default=True,
    help="Axis of the loss.",
)
@click.option(
    "--smooth",
    type=click.IntRange(2),
    metavar="STEPS",
    help="Draw the loss as a mean over this many steps.",
)
@json_option()
def runs_plot_command(
    names: tuple[str, ...],
    root: str,
    out: str,
    scale: str,
    smooth: int | None,
    json_path: str | None,
) -> None:
    """Draw runs from their journals.

    Draws loss, dev metric, learning rate, memory and events.

    A run is a name in --runs, a folder or a journal. Exit status: 0 drawn, 2 a run can't be read.
    """
    try:
        histories = [
            read_history(find_journal(name, root=root), name=name) for name in dict.fromkeys(names)
        ]
        coloured = plot_runs(histories, out, scale=scale, smooth=smooth)
    except (RunError, ValueError) as error:
        raise UnusableInput(printable(str(error), longest=1000)) from error
    except RuntimeError as error:  # matplotlib is missing
        raise UnusableInput(str(error)) from error
    if json_path:
        rows = [_summary(history) | {"coloured": history.name in coloured} for history in histories]
        write_json(json_path, finite({"out": out, "runs": rows}))
    many = "1 run" if len(histories) == 1 else f"{len(histories)} runs"
    click.echo(f"{many} drawn as {out}", err=json_path == "-")


def _summary(history: History) -> dict[str, Any]:
    steps = history.steps
    return {
        "name": history.name,
        "run": history.run,
        "attempts": len(history.attempts),
        "num_steps": len(steps),
        "first_step": steps.step[0] if steps else None,
        "last_step": steps.step[-1] if steps else None,
        "last_loss": steps.values["loss"][-1] if steps else None,
        "superseded_steps": sum(len(part) for part in history.course.superseded),
        "events": {kind: len(marks.step) for kind, marks in sorted(history.marks.items())},
        "metrics": {
            name: {
                "last": course.steps.values["value"][-1],
                "least": min(course.steps.values["value"]),
            }
            for name, course in history.metrics.items()
            if len(course.steps)
        },
        "damaged_lines": history.num_damaged,
    }
