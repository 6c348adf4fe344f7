"""Events in the plot of runs: a row of marks per run, spikes and rollbacks at the loss.

Proof: `python -m pytest tests/test_runs_plot.py`.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy

from .runs.journal_history import History
from .runs.journal_lines import Event, number_of

SPIKE = "#EE6677"
MARKS = {  # marker and size of each kind of event
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
    for kind, (sign, size) in MARKS.items():
        for row, (history, colour, _) in enumerate(runs):
            if kind not in history.marks:
                continue
            steps = numpy.array(history.marks[kind].step)
            if len(steps) > MOST_SAVES:
                steps = steps[numpy.linspace(0, len(steps) - 1, MOST_SAVES).astype(int)]
            shown = SPIKE if kind == "spike" else colour
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
        sign, size = MARKS[kind]
        shown = SPIKE if kind == "spike" else "#444444"
        handles.append(
            Line2D([], [], color=shown, marker=sign, markersize=size, linestyle="none", label=kind)
        )
    return handles


def draw_rollbacks(axes: Any, history: History, colour: str, *, arrows: bool) -> None:
    """Draw spikes at their loss, and an arrow from the start to the target of each rollback."""
    for event in history.marks["spike"].events if "spike" in history.marks else []:
        _mark(axes, event.step, loss_at(history, event), sign="v", colour=SPIKE)
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
    recorded = number_of(event.facts.get("loss"))
    return recorded if math.isfinite(recorded) else None
