"""The picture of a plan: what each budget costs for each microbatch, and where the plan stands.

Proof: `python -m pytest tests/test_plan_memory.py`.
"""

from pathlib import Path

import numpy

from .core.sizes import format_bytes
from .plan.planner import Planner
from .plan.saved_plan import Plan
from .plots import require_matplotlib

NUM_BUDGETS = 24
GIB = 2**30


def plot_plan(planner: Planner, plan: Plan, path: str | Path) -> None:
    """A line for each microbatch: predicted seconds of the whole batch at each budget that it fits."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    unit, name = (GIB, "GiB") if plan.budget_bytes >= GIB else (2**20, "MiB")
    for candidate in sorted(plan.candidates, key=lambda c: (c.microbatch, c.chunked_loss)):
        points = planner.front(candidate, numpy.linspace(0.3, 2.0, NUM_BUDGETS) * plan.budget_bytes)
        if points:
            label = f"microbatch {candidate.microbatch}{', chunked loss' if candidate.chunked_loss else ''}"
            peaks, seconds = zip(*points, strict=True)
            axes.plot([peak / unit for peak in peaks], seconds, marker=".", label=label, drawstyle="steps-post")
    axes.axvline(
        plan.budget_bytes / unit, color="black", linestyle=":", label=f"budget {format_bytes(plan.budget_bytes)}"
    )
    axes.plot(
        plan.peak_bytes / unit,
        plan.step_seconds,
        marker="*",
        markersize=16,
        color="black",
        linestyle="none",
        label="the plan",
    )
    axes.set_xlabel(f"predicted peak, {name}")
    axes.set_ylabel("predicted seconds of a whole batch")
    axes.set_title(f"{plan.workload}: {plan.steps} x {plan.microbatch} samples on {plan.settings['device']}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
