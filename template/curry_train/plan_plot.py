"""Plot of a plan: predicted step time against memory, for each microbatch.

The rows of the plan's table are marked.

Proof: `python -m pytest tests/test_plan_memory.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .core.sizes import format_bytes
from .plan.planner import Planner
from .plan.saved_plan import Candidate, Plan
from .plots import require_matplotlib

# Of Paul Tol's palettes for colour-blind readers: a colour for each microbatch.
COLOURS = (
    "#4477AA",
    "#EE6677",
    "#228833",
    "#AA3377",
    "#CCBB44",
    "#66CCEE",
    "#222255",
    "#882255",
    "#44AA99",
    "#777777",
)
WIDEST = 2.0  # largest budget drawn, as a multiple of the plan's
STEP = 0.03  # smallest distance between points of a line, as a fraction of the budget
GIB = 2**30
MIB = 2**20
TOLD = (
    "Each line is one microbatch. Each step of a line is another choice of blocks to recompute: "
    "more memory, less recompute.\n"
    "Dots are rows of the table (--explain); those right of the budget are too large."
)


def plot_plan(planner: Planner, plan: Plan, path: str | Path) -> dict[str, list[Candidate]]:
    """Write a PNG and return the drawn candidates by their name in the legend.

    Each microbatch is a line: the predicted time of an optimizer step at each budget that it fits.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.add_subplot()
    size, unit = (GIB, "GiB") if plan.budget_bytes >= GIB else (MIB, "MiB")
    rows = sorted(plan.candidates, key=lambda row: (row.microbatch, row.chunked_loss))
    microbatches = sorted({row.microbatch for row in rows})
    most = round(WIDEST * plan.budget_bytes)
    step = round(STEP * plan.budget_bytes)

    lines: dict[str, list[Candidate]] = {}
    for row in rows:
        front = trade_off(planner, row, most, step_bytes=step)
        if not front:
            continue
        chunked = ", chunked loss" if row.chunked_loss else ""
        name = f"{row.steps} x {row.microbatch} samples{chunked}"
        lines[name] = front
        colour = COLOURS[microbatches.index(row.microbatch) % len(COLOURS)]
        _draw_plan_line(axes, row, front, size=size, colour=colour, name=name)
    _draw_chosen_plan(axes, plan, size=size)

    per_rank = " of each rank" if plan.ranks > 1 else ""
    axes.set_xlabel(f"predicted peak memory{per_rank}, {unit}")
    samples = plan.steps * plan.microbatch * plan.ranks
    axes.set_ylabel(f"predicted time of one optimizer step ({samples} samples), ms")
    axes.set_title(
        f"{plan.workload} on {plan.settings['device']}: the plan is {plan.steps} x "
        f"{plan.microbatch} samples, {format_bytes(plan.peak_bytes)}, "
        f"{1e3 * plan.step_seconds:,.1f} ms",
        loc="left",
        fontsize=11,
    )
    figure.supxlabel(TOLD, x=0.01, ha="left", fontsize=8, color="#555555")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=120)
    return lines


def _draw_plan_line(
    axes: Any, row: Candidate, front: Sequence[Candidate], *, size: int, colour: str, name: str
) -> None:
    """Draw the trade-off of a microbatch, with a dot at the row of the plan's table."""
    axes.plot(
        [candidate.peak_bytes / size for candidate in front],
        _milliseconds(front),
        "--" if row.chunked_loss else "-",
        color=colour,
        label=name,
        drawstyle="steps-post",
        linewidth=1.5,
    )
    marked = [candidate for candidate in front if candidate.options == row.options]
    axes.plot(
        [candidate.peak_bytes / size for candidate in marked],
        _milliseconds(marked),
        "o",
        color=colour,
        markersize=6,
    )


def _draw_chosen_plan(axes: Any, plan: Plan, *, size: int) -> None:
    """Draw the budget, the area above it, and a star at the chosen plan."""
    budget = plan.budget_bytes / size
    left, right = axes.get_xlim()
    axes.axvspan(budget, max(right, budget), color="#F0F0F0", linewidth=0, zorder=0)
    axes.set_xlim(left, max(right, budget))
    axes.axvline(
        budget, color="black", linestyle=":", label=f"the budget, {format_bytes(plan.budget_bytes)}"
    )
    axes.plot(
        plan.peak_bytes / size,
        1e3 * plan.step_seconds,
        label="the plan",
        marker="*",
        markersize=17,
        color="black",
        linestyle="none",
        zorder=5,
    )
    axes.plot([], [], "o", color="#555555", markersize=6, label="a row of the table")


def trade_off(
    planner: Planner, row: Candidate, most_bytes: int, *, step_bytes: int
) -> list[Candidate]:
    """Return the Pareto front of peak and step time for a microbatch, up to `most_bytes`.

    It begins with the smallest peak. Figures come from the estimate of the whole step where there
    is one, else from the chain of blocks. A row that fits appears as it is in the table.
    """
    estimated = list(planner.whole_steps.looked_at(row))
    if row.step_seconds is not None:
        estimated.append(row)
    by_options = {(*candidate.options.items(),): candidate for candidate in estimated}
    found = [candidate for candidate in by_options.values() if candidate.peak_bytes <= most_bytes]

    budget = most_bytes
    while (solved := planner.whole_steps.solve(row, budget)).peak_bytes <= budget:
        found.append(by_options.get((*solved.options.items(),), solved))
        budget = max(1, min(solved.peak_bytes - 1, budget - step_bytes))

    front: list[Candidate] = []
    for candidate in sorted(found, key=lambda one: (one.peak_bytes, _seconds(one))):
        if not front or _seconds(candidate) < _seconds(front[-1]):
            front.append(candidate)
    return front


def _seconds(candidate: Candidate) -> float:
    return float("inf") if candidate.step_seconds is None else candidate.step_seconds


def _milliseconds(candidates: Sequence[Candidate]) -> list[float]:
    return [1e3 * _seconds(candidate) for candidate in candidates]
