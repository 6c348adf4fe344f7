"""Draw the pictures of the commands as PNG.

    plot_bench(bench, "bench.png")
    plot_savings(rows, "savings.png", device="cpu")

Colours are from Paul Tol's palettes for colour-blind readers.

Proof: `python -m pytest tests/cli/test_runs_plot.py tests/bench/test_savings.py`.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy

from ..bench.report import Bench
from ..bench.savings import REFERENCE_STRATEGY, SavingsRow
from ..bench.steps import MEASURED_OUTCOME, PLAIN_LEVER, SetupRow
from ..core.timing import Ratio
from ..core.wording import format_bytes, format_mebibytes, format_seconds
from ..plan.planner import Planner
from ..plan.saved import Candidate, Plan
from ..primitives.grad_flow import LayerFlow, StepFlow
from ..runs.history import History, Steps
from ..runs.journal import printable
from .memory_page import OWNER_COLOURS, MemoryCourse
from .options import require_matplotlib

COLOURS = (
    "#4477AA",
    "#EE6677",
    "#228833",
    "#AA3377",
    "#CCBB44",
    "#66CCEE",
    "#222255",
    "#EE8866",
    "#999933",
    "#882255",
    "#117733",
    "#332288",
    "#AA4499",
    "#DDAA33",
)
T = TypeVar("T")
GREY_COLOUR = "#555555"
RIGHT = "outside right upper"  # of the panels, for a legend
STRATEGY_MARKERS = "osD^vP<X>hpd8H"
BYTES_PER_MIB = 2**20
BYTES_PER_GIB = 2**30


STYLE: Any = {
    "font.size": 8,
    "figure.titlesize": 12,
    "figure.constrained_layout.use": True,
    "axes.prop_cycle": f"cycler(color={COLOURS})",  # "C0" is the first of them
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "xaxis.labellocation": "left",
}


@contextlib.contextmanager
def _open_picture(
    path: str | Path, width: float, height: float, title: str, note: str = ""
) -> Iterator[Any]:
    """Provide an empty figure with its title, and a note below; write it as PNG at the end."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        # A dollar sign of a file's name would begin a formula.
        figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left")
        if note:
            figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color=GREY_COLOUR)
        yield figure
        figure.savefig(path, format="png", dpi=150)


# bench and savings: what each setup saves and costs, a mark for each.

TRADE_NOTE = "mark: the median; thin line: its 95% interval; dashed: the Pareto front"
RATIO_AXIS = "step time / that of the plain step in the same round"


def _step_ratio(row: SetupRow) -> Ratio | None:
    """Return the ratio of the step time to the plain step's, None if that was not measured."""
    is_plain = row.name in (PLAIN_LEVER.name, REFERENCE_STRATEGY)
    return Ratio(1.0, None, None, None) if is_plain else row.ratio


def _flop_ratio(row: SavingsRow) -> Ratio:
    return Ratio(100 * (row.recompute_ratio or 0), None, None, None)


def _plot_trades(
    path: str | Path,
    title: str,
    cases: Mapping[str, Sequence[SetupRow]],
    costs: Mapping[str, Callable[[Any], Ratio | None]],
) -> None:
    """Draw the peak over the cost of each setup; a setup looks alike in all panels.

    `cases` are the rows of each line of panels, by its title; `costs` are functions of a row, by
    the label of their axis.
    """
    names = list(dict.fromkeys(row.name for rows in cases.values() for row in rows))
    marks = {}
    width, height = 3.5 + 4 * len(costs), 0.5 + 4 * len(cases)
    with _open_picture(path, width, height, title, TRADE_NOTE) as figure:
        grid = figure.subplots(len(cases), len(costs), squeeze=False)
        panels = itertools.product(cases.items(), costs.items())
        for axes, ((case, rows), (axis, cost_of)) in zip(grid.flat, panels, strict=True):
            points = []
            for row in rows:
                cost = cost_of(row)
                if cost is None or row.peak_bytes is None:
                    continue
                peak = row.peak_bytes / BYTES_PER_MIB
                points.append((cost.median, peak))
                number = names.index(row.name)
                marker = STRATEGY_MARKERS[number % len(STRATEGY_MARKERS)]
                colour = f"C{number}"
                (marks[row.name],) = axes.plot(cost.median, peak, marker, color=colour)
                if cost.lower is not None:
                    axes.hlines(peak, cost.lower, cost.upper, colour, linewidth=0.9, alpha=0.5)
            front = zip(*pareto(points, tuple), strict=True)
            axes.plot(*front, color="#999999", linestyle="--", drawstyle="steps-post", zorder=1)
            axes.set(xlabel=axis, ylabel="peak, MiB", title=case)
            axes.set_ylim(bottom=0)
        figure.legend(marks.values(), marks.keys(), loc=RIGHT)


def plot_bench(bench: Bench, path: str | Path) -> None:
    """Write a PNG of the measured configurations."""
    title = (
        f"{bench.workload}, batch size {bench.batch_size}, {bench.dtype}, {bench.optimizer}, on "
        f"{bench.device}: one optimizer step"
    )
    _plot_trades(
        path, title, {"": [row for row in bench.rows if row.step]}, {RATIO_AXIS: _step_ratio}
    )


def plot_savings(rows: Sequence[SavingsRow], path: str | Path, *, device: str) -> None:
    """Write a PNG of the rows that were measured, a line of panels for each case."""
    title = f"What each strategy saves, and what it costs, on {device}"
    measured = [row for row in rows if row.outcome == MEASURED_OUTCOME and not row.stays_here]
    by_case = itertools.groupby(measured, key=lambda row: row.label)
    cases = {label: list(shown) for label, shown in by_case}
    costs = {RATIO_AXIS: _step_ratio, "recomputed FLOPs, % of one forward": _flop_ratio}
    _plot_trades(path, title, cases, costs)


def pareto(found: Iterable[T], point_of: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the Pareto front from left to right; lower is better in both coordinates.

    Of several with the same point it has the first.
    """
    front: list[T] = []
    for one in sorted(found, key=point_of):
        if not front or point_of(one)[1] < point_of(front[-1])[1]:
            front.append(one)
    return front


# grad-flow: layers by probed steps, a panel for each quantity.

PANELS = {"activation": "activation, rms", "gradient": "gradient, rms", "update": "update / weight"}
NONFINITE_COLOUR = "#E4002B"
NOT_SEEN_COLOUR = "#E8E8E8"
ZERO_COLOUR = "black"
MOST_NAMES = 60  # more names than this are unreadable next to each other
COLOUR_DECADES = 8  # decades of the colour scale; smaller values share its darkest colour


def plot_flow(records: Sequence[StepFlow], path: str | Path, *, title: str) -> None:
    """Write a PNG: red marks inf or nan in a layer, grey a layer that was not called."""
    names = list(records[-1].layers)
    height = min(22.0, max(3.4, 1.8 + 0.17 * len(names)))
    width = 11 + 0.07 * max(map(len, names))
    with _open_picture(path, width, height, title) as figure:
        from matplotlib.patches import Patch

        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, (kind, label) in zip(panels, PANELS.items(), strict=True):
            cells = [
                [_read_cell(record.layers[name], kind) for record in records] for name in names
            ]
            image = _draw_cells(axes, numpy.array(cells, dtype=float))
            bar = figure.colorbar(image, ax=axes, location="top", shrink=0.9, pad=0.01, aspect=30)
            bar.set_label(label)
            bar.ax.xaxis.set_minor_formatter("")  # over about a decade its labels overlap
            axes.set(xlabel="step")
            axes.grid(False)
            places = [0, len(records) - 1]
            axes.set_xticks(places, [str(records[at].step) for at in places])

        rows = range(0, len(names), -(-len(names) // MOST_NAMES))
        panels[0].set_yticks(rows, [names[row] for row in rows], fontsize=7, family="monospace")
        legend = [
            Patch(color=NONFINITE_COLOUR, label="inf or nan"),
            Patch(color=NOT_SEEN_COLOUR, label="not seen"),
            Patch(color=ZERO_COLOUR, label="exactly 0"),
        ]
        figure.legend(handles=legend, loc="outside lower right", ncols=3)


def _read_cell(layer: LayerFlow, kind: str) -> float | None:
    """Return the drawn figure of a layer: infinite where a value is not finite, None: not seen."""
    found: Any = getattr(layer, kind)
    if found is None:
        return None
    if kind == "update":
        return found.ratio if math.isfinite(found.distance + found.weight_norm) else math.inf
    return math.inf if found.nonfinite else found.rms


def _draw_cells(axes: Any, grid: Any) -> Any:
    """Draw values on a logarithmic scale, which spans at least a decade."""
    import matplotlib
    from matplotlib.colors import ListedColormap, LogNorm

    good = grid[numpy.isfinite(grid) & (grid > 0)]
    highest = good.max(initial=0.0) or 1.0
    # A small range would let noise look like a slope.
    lowest = min(max(good.min(initial=highest), highest / 10**COLOUR_DECADES), highest / 10)

    # Without the darkest end of viridis, which is left to values that are exactly 0.
    colours: Any = ListedColormap(matplotlib.colormaps["viridis"](numpy.linspace(0.15, 1.0, 256)))
    # Values out of the scale have the colours of its ends; LogNorm would mask 0 and infinity.
    shown = grid.clip(lowest, 2 * highest)
    shown[grid == 0] = lowest / 2
    norm = LogNorm(lowest, highest)
    colours = colours.with_extremes(bad=NOT_SEEN_COLOUR, under=ZERO_COLOUR, over=NONFINITE_COLOUR)
    return axes.imshow(shown, norm=norm, cmap=colours, aspect="auto", interpolation="nearest")


# memory: bytes by owner over a step or a record, and at its peak.


def plot_course(course: MemoryCourse, path: str | Path) -> None:
    """Write a PNG: bytes by owner over the record; the legend has those at its peak."""
    at_peak = {owner: sizes[course.peak_place] for owner, sizes in course.owners.items()}
    total = max(sum(at_peak.values()), 1)
    with _open_picture(path, 11, 4.6, course.title) as figure:
        axes = figure.add_subplot()
        for number, (phase, start, end) in enumerate(course.phases):
            axes.axvspan(start, end, color=("#F4F4F4", "#FFFFFF")[number % 2], zorder=0)
            if (end - start) * 80 >= course.end * len(phase):
                axes.text((start + end) / 2, 0, phase, ha="center", va="bottom")
        axes.stackplot(
            course.moments,
            numpy.array([*course.owners.values()]) / BYTES_PER_MIB,
            colors=[OWNER_COLOURS[owner] for owner in course.owners],
            labels=[
                f"{owner}  {format_mebibytes(size)} ({size / total:.0%})"
                for owner, size in at_peak.items()
            ],
            step="post",
            linewidth=0,
        )
        if course.reserved:
            reserved = numpy.array(course.reserved) / BYTES_PER_MIB
            axes.step(course.moments, reserved, "k", where="post", linewidth=1, label="reserved")
        peak = course.moments[course.peak_place]
        axes.plot(peak, total / BYTES_PER_MIB, "vk", label=course.peak_text)
        axes.set(xlabel=course.unit, ylabel="MiB alive")
        axes.set_xlim(course.moments[0], course.end)
        axes.set_ylim(bottom=0)
        axes.grid(False, axis="x")
        figure.legend(title="MiB at the peak", reverse=True, loc=RIGHT)


# plan: predicted step time against memory, a line for each microbatch.

WIDEST_BUDGET_RATIO = 2.0  # largest budget drawn, as a multiple of the plan's
POINT_SPACING_FRACTION = 0.03  # smallest distance of points of a line, as a fraction of the budget
PLAN_PLOT_NOTE = (
    "Each line is one microbatch. Each step of a line is another choice of blocks to recompute: "
    "more memory, less recompute.\n"
    "Dots are rows of the table (--explain); those right of the budget are too large."
)


def plot_plan(planner: Planner, plan: Plan, path: str | Path) -> None:
    """Write a PNG of what the plan was chosen from.

    Each microbatch is a line: the predicted time of an optimizer step at each budget that it fits.
    """
    size, unit = BYTES_PER_MIB, "MiB"
    if plan.budget_bytes >= BYTES_PER_GIB:
        size, unit = BYTES_PER_GIB, "GiB"
    per_second, time_unit = (1.0, "s") if plan.step_seconds >= 1 else (1e3, "ms")
    title = (
        f"{plan.workload} on {plan.settings['device']}: the plan is {plan.steps} x "
        f"{plan.microbatch} sample{'s' * (plan.microbatch > 1)}"
        f"{', chunked loss' * (plan.chunk_tokens is not None)}, {format_bytes(plan.peak_bytes)}, "
        f"{format_seconds(plan.step_seconds)}"
    )
    most = round(WIDEST_BUDGET_RATIO * plan.budget_bytes)
    step = round(POINT_SPACING_FRACTION * plan.budget_bytes)
    microbatches = sorted({row.microbatch for row in plan.candidates})
    with _open_picture(path, 10, 5.6, title, PLAN_PLOT_NOTE) as figure:
        axes = figure.add_subplot()
        for row in sorted(plan.candidates, key=lambda row: (row.microbatch, row.chunked_loss)):
            front = trade_off(planner, row, most, step_bytes=step)
            if not front:
                continue
            axes.plot(
                [candidate.peak_bytes / size for candidate in front],
                [per_second * (candidate.step_seconds or math.inf) for candidate in front],
                "--o" if row.chunked_loss else "-o",
                color=f"C{microbatches.index(row.microbatch)}",
                label=f"{row.steps} x {row.microbatch} sample{'s' * (row.microbatch > 1)}"
                f"{', chunked loss' * row.chunked_loss}",
                drawstyle="steps-post",
                markevery=[at for at, one in enumerate(front) if one.options == row.options],
            )
        budget = plan.budget_bytes / size
        left, right = axes.get_xlim()
        axes.axvspan(budget, max(right, budget), color="#F0F0F0", linewidth=0, zorder=0)
        # Room for the marks of small peaks, where the budget is far larger.
        axes.set_xlim(max(0.0, left - 0.03 * (budget - left)), max(right, budget))
        axes.axvline(
            budget,
            color="black",
            linestyle=":",
            label=f"the budget, {format_bytes(plan.budget_bytes)}",
        )
        axes.plot(
            plan.peak_bytes / size,
            per_second * plan.step_seconds,
            "*k",
            markersize=17,
            zorder=5,
            label="the plan",
        )
        per_rank = " of each rank" if plan.ranks > 1 else ""
        samples = plan.steps * plan.microbatch * planner.sharding.data_ranks
        axes.set(
            xlabel=f"predicted peak memory{per_rank}, {unit}",
            ylabel=f"predicted time of one optimizer step of {samples} "
            f"sample{'s' * (samples > 1)}, {time_unit}",
        )
        # Long enough to show which lines are dashed.
        figure.legend(handlelength=4, loc=RIGHT)


def trade_off(
    planner: Planner, row: Candidate, most_bytes: int, *, step_bytes: int
) -> list[Candidate]:
    """Return the Pareto front of peak and step time for a microbatch, up to `most_bytes`.

    It begins with the smallest peak. Figures come from the estimate of the whole step where there
    is one, else from the chain of blocks. A row that fits appears as it is in the table.
    """
    estimated = planner.whole_steps.looked_at(row)
    if row.step_seconds is not None:
        estimated.insert(0, row)
    found = [candidate for candidate in estimated if candidate.peak_bytes <= most_bytes]
    budget = most_bytes
    while (solved := planner.whole_steps.predict(row, budget)).peak_bytes <= budget:
        if all(candidate.options != solved.options for candidate in estimated):
            found.append(solved)
        budget = max(1, min(solved.peak_bytes - 1, budget - step_bytes))
    return pareto(found, lambda one: (one.peak_bytes, one.step_seconds or math.inf))


# runs plot: loss, dev metric, learning rate, memory and events of runs from their journals.

# Runs with a name, those with the lowest last loss.
MOST_NAMED = len(COLOURS)
FAINT_OPACITY = 0.45  # opacity of steps that were rolled back or resumed over
LONGEST_RUN_NAME = 30  # longest name, in characters
LOG_FROM = 10.0  # ratio of greatest to least loss from which the axis is logarithmic
EVENT_MARKERS = {
    "save": "|",
    "resume": ">",
    "rollback": "<",
    "spike": "v",
    "skip": "x",
    "warning": "d",
    "stop": "s",
}


def plot_runs(histories: Sequence[History], path: str | Path) -> None:
    """Write a PNG of runs, which names those with the lowest losses."""
    with_steps = (history for history in histories if len(history.steps))
    drawn = sorted(
        with_steps, key=lambda one: numpy.nan_to_num(one.steps.values["loss"][-1], nan=math.inf)
    )
    if not drawn:
        raise ValueError("there is nothing to draw: no journal has a step that counts")
    metrics = [name for history in drawn for name in history.metrics]
    metric = max(metrics, key=metrics.count, default="")
    labels = {"loss": "loss"}
    if metric:
        labels["value"] = printable(metric, longest=20).replace("_", " ")
    labels |= {"learning_rate": "learning rate", "peak_bytes": "peak, GiB"}
    heights = [3.4, *[1.2] * (len(labels) - 1), 0.25 + 0.14 * min(len(drawn), MOST_NAMED)]
    title = f"{len(drawn)} runs" if len(drawn) > 1 else shorten(drawn[0].name)
    with _open_picture(path, 11, sum(heights) + 1.5, title) as figure:
        panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
        for axes, (name, label) in zip(panels, labels.items(), strict=False):
            # The runs with a name are drawn last, over the others.
            for number, history in reversed([*enumerate(drawn)]):
                steps = history.metrics.get(metric) if name == "value" else history.steps
                is_named = name == "loss" and number < MOST_NAMED
                run = shorten(history.name) if is_named else None
                if steps is not None:
                    _draw_values(axes, steps, name, f"C{number}", label=run)
            axes.set(ylabel=label)
        least, most = panels[0].dataLim.intervaly
        if 0 < LOG_FROM * least < most:
            panels[0].set_yscale("log")
        for axes in panels[-3:-1]:
            axes.set_ylim(bottom=0)
        _draw_events(panels[-1], drawn[:MOST_NAMED])
        if len(drawn) > 1:
            figure.legend(reverse=True, loc=RIGHT)


def shorten(name: str) -> str:
    """Shorten a name in its middle, because its end tells runs apart."""
    shown = printable(name)
    if len(shown) <= LONGEST_RUN_NAME:
        return shown
    return f"{shown[: LONGEST_RUN_NAME - 17]}...{shown[-14:]}"


def _draw_values(axes: Any, current: Steps, name: str, colour: str, *, label: str | None) -> None:
    """Draw the steps that count, and faintly those that were rolled back or resumed over.

    Losses that are not finite are marked at the edge; lines leave them out.
    """
    for steps in (*current.superseded, current):
        x = numpy.asarray(steps.step)
        y = numpy.asarray(steps.values[name])
        if name == "peak_bytes":
            y = y / BYTES_PER_GIB
        lost = x[~numpy.isfinite(y)] if name == "loss" else x[:0]
        counts = steps is current
        look = {"alpha": None if counts else FAINT_OPACITY, "label": label if counts else None}
        # A value alone has no line.
        axes.plot(x, y, "." if len(x) == 1 else "-", color=colour, linewidth=1.2, **look)
        edge = axes.get_xaxis_transform()
        axes.plot(lost, [0.98] * len(lost), "x", color=NONFINITE_COLOUR, transform=edge, zorder=5)


def _draw_events(axes: Any, runs: Sequence[History]) -> None:
    """Draw a row of events for each run, with a legend of their signs below."""
    signs = {}
    for row, history in enumerate(runs):
        axes.axhline(row, color=f"C{row}", linewidth=0.7, alpha=0.4, zorder=1)
        for kind, marker in EVENT_MARKERS.items():
            if steps := [event.step for event in history.events.get(kind, [])]:
                colour = NONFINITE_COLOUR if kind == "spike" else f"C{row}"
                (signs[kind],) = axes.plot(steps, [row] * len(steps), marker, color=colour)
    (faint,) = axes.plot([], [], color=GREY_COLOUR, alpha=FAINT_OPACITY)
    signs["rolled back or resumed over"] = faint
    axes.figure.legend(signs.values(), signs.keys(), loc="outside lower left", ncols=len(signs))
    axes.set(xlabel="step", ylabel="events", ylim=(len(runs) - 0.4, -0.6), yticks=[])
    axes.grid(False, axis="y")
