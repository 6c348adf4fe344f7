"""The picture of a plan: what each budget costs for each microbatch, with the rows of the plan's table marked.

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
WIDEST = 2.0  # budgets that are drawn, of the plan's
STEP = 0.03  # of the budget, from point to point of a line at least
GIB, MIB = 2**30, 2**20
TOLD = (
    "A line is one microbatch, a step of it another choice of the blocks that are recomputed: the more memory, the "
    "less is computed again.\nDots are the rows of the table (--explain); right of the budget they are too large."
)


def plot_plan(planner: Planner, plan: Plan, path: str | Path) -> dict[str, list[Candidate]]:
    """Write a PNG; returns what is drawn, by its name in the legend. A line for each microbatch: predicted time of an
    optimizer step at each budget that it fits."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.add_subplot()
    size, unit = (GIB, "GiB") if plan.budget_bytes >= GIB else (MIB, "MiB")
    rows = sorted(plan.candidates, key=lambda one: (one.microbatch, one.chunked_loss))
    sizes = sorted({one.microbatch for one in rows})
    lines: dict[str, list[Candidate]] = {}
    most, step = round(WIDEST * plan.budget_bytes), round(STEP * plan.budget_bytes)
    for row in rows:
        front = trade_off(planner, row, most, step_bytes=step)
        if not front:
            continue
        name = (
            f"{row.steps} x {row.microbatch} samples{', chunked loss' if row.chunked_loss else ''}"
        )
        lines[name] = front
        colour = COLOURS[sizes.index(row.microbatch) % len(COLOURS)]
        places, times = [one.peak_bytes / size for one in front], _milliseconds(front)
        style = "--" if row.chunked_loss else "-"
        axes.plot(
            places, times, style, color=colour, label=name, drawstyle="steps-post", linewidth=1.5
        )
        marked = [one for one in front if one.options == row.options]
        axes.plot(
            [one.peak_bytes / size for one in marked],
            _milliseconds(marked),
            "o",
            color=colour,
            markersize=6,
        )
    budget = plan.budget_bytes / size
    left, right = axes.get_xlim()
    axes.axvspan(budget, max(right, budget), color="#F0F0F0", linewidth=0, zorder=0)
    axes.set_xlim(left, max(right, budget))
    axes.axvline(
        budget, color="black", linestyle=":", label=f"the budget, {format_bytes(plan.budget_bytes)}"
    )
    star: dict[str, Any] = {
        "marker": "*",
        "markersize": 17,
        "color": "black",
        "linestyle": "none",
        "zorder": 5,
    }
    axes.plot(plan.peak_bytes / size, 1e3 * plan.step_seconds, label="the plan", **star)
    axes.plot([], [], "o", color="#555555", markersize=6, label="a row of the table")
    axes.set_xlabel(f"predicted peak memory{' of each rank' if plan.ranks > 1 else ''}, {unit}")
    samples = plan.steps * plan.microbatch * plan.ranks
    axes.set_ylabel(f"predicted time of one optimizer step ({samples} samples), ms")
    chosen = f"{plan.steps} x {plan.microbatch} samples, {format_bytes(plan.peak_bytes)}, "
    axes.set_title(
        f"{plan.workload} on {plan.settings['device']}: the plan is {chosen}{1e3 * plan.step_seconds:,.1f} ms",
        loc="left",
        fontsize=11,
    )
    figure.supxlabel(TOLD, x=0.01, ha="left", fontsize=8, color="#555555")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=120)
    return lines


def trade_off(
    planner: Planner, row: Candidate, most_bytes: int, *, step_bytes: int
) -> list[Candidate]:
    """What a microbatch costs at each budget up to `most_bytes`, those of the least peak first. The chain of blocks
    says it, and the whole step wherever it was estimated; a row that fits is as it is in the table."""
    looked_at = [*planner.whole_steps.looked_at(row), *([] if row.step_seconds is None else [row])]
    known = {(*one.options.items(),): one for one in looked_at}
    found, budget = [one for one in known.values() if one.peak_bytes <= most_bytes], most_bytes
    while (one := planner.whole_steps.solve(row, budget)).peak_bytes <= budget:
        found.append(known.get((*one.options.items(),), one))
        budget = max(1, min(one.peak_bytes - 1, budget - step_bytes))
    front: list[Candidate] = []
    for each in sorted(found, key=lambda one: (one.peak_bytes, _seconds(one))):
        if not front or _seconds(each) < _seconds(front[-1]):
            front.append(each)
    return front


def _seconds(candidate: Candidate) -> float:
    return float("inf") if candidate.step_seconds is None else candidate.step_seconds


def _milliseconds(candidates: Sequence[Candidate]) -> list[float]:
    return [1e3 * _seconds(one) for one in candidates]
