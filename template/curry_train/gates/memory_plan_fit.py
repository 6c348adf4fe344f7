"""What is estimated from shapes is what a step takes, and a plan fits its budget and trains the same model.

Proof: `python -m pytest tests/test_memory_plan_fit.py`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from ..core.blocks import NoBlocks, find_blocks
from ..core.verdict import Gate, Verdict, not_applicable
from ..core.workload import Case
from ..plan.device_profile import find_profile
from ..plan.estimate import Sketch
from ..plan.optimizers import make_optimizer
from ..plan.options import FULL, OFFLOAD, REGIONS, SAC, Option, apply_options
from ..plan.planner import Infeasible, Planner
from ..plan.same_training import same_training
from ..plan.saved_plan import Plan
from ..plan.step_lives import record_step
from ..plan.timeline import timeline_of

PLAIN, IN_TURNS = (
    "plain",
    "full and regions",
)  # as it is, and with the blocks recomputed whole and by regions in turns
BETWEEN = 0.5  # where the budget stands between the peaks of these two
CLOSE = 0.02  # on CUDA, where the allocator rounds and libraries take workspaces
Change = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Prepared:
    """From shapes: the peak of a step as it is and, where there are blocks, with these in turns; a plan or why there is
    none; and why nothing can be told from shapes, if so."""

    peaks: Mapping[str, int]
    plan: Plan | str
    why_real: str | None


def estimate(case: Case, *, predict: Callable[[Case], Mapping[str, int]] | None = None) -> Verdict:
    """A step as it is, and one with blocks recomputed in turns: predicted and measured."""
    gate, cuda = "memory-plan/estimate", case.device.type == "cuda"
    required = f"within {CLOSE:.0%}" if cuda else "equal to the byte"
    if (why := prepared(case).why_real) is not None:
        return not_applicable(gate, required=required, why=why)
    predicted = prepared(case).peaks if predict is None else predict(case)
    ways = {PLAIN: None, IN_TURNS: _in_turns(case.blocks)}
    pairs = {way: (peak, measured_peak(case, ways[way])) for way, peak in predicted.items()}
    wrong = {
        way: pair
        for way, pair in pairs.items()
        if abs(pair[0] - pair[1]) > (CLOSE * pair[1] if cuda else 0)
    }
    told = (wrong or pairs).items()
    measured = "; ".join(f"{way} {ours:,} of {theirs:,}" for way, (ours, theirs) in told)
    hint = (
        ""
        if not wrong
        else "an owner is forgotten, or an operation takes other bytes than its shapes say"
    )
    return Verdict(gate, not wrong, measured, required, hint)


def fits(case: Case, *, make: Callable[[Case], Plan | str] | None = None) -> Verdict:
    """A plan for a budget between the least peak and the plain one: applied, a step takes what was predicted."""
    gate, required = "memory-plan/fits", "a peak within the budget, as predicted"
    plan = (make or planned)(case)
    if isinstance(plan, str):
        return not_applicable(gate, required=required, why=plan)
    peak = measured_peak(case, plan.apply)
    off = abs(peak - plan.peak_bytes)
    held = peak <= plan.budget_bytes and off <= (CLOSE * peak if case.device.type == "cuda" else 0)
    measured = f"peak {peak:,}, predicted {plan.peak_bytes:,}, budget {plan.budget_bytes:,}"
    hint = (
        "" if held else "the plan is not what runs, or the chain's arithmetic leaves something out"
    )
    return Verdict(gate, held, measured, required, hint)


def parity(case: Case, *, make: Callable[[Case], Plan | str] | None = None) -> Verdict:
    """One step with the plan and one without: loss, gradients, buffers and generators."""
    gate = "memory-plan/parity-plan"
    plan = (make or planned)(case)
    if isinstance(plan, str):
        return not_applicable(gate, required="bit-equal", why=plan)
    return same_training(gate, case, lambda module, sample: plan.apply(module), alone=_alone(plan))


GATES = (
    Gate("memory-plan/estimate", estimate),
    Gate("memory-plan/fits", fits),
    Gate("memory-plan/parity-plan", parity),
)


@functools.lru_cache(maxsize=8)
def prepared(case: Case) -> Prepared:
    """What all gates ask for, from one sketch of the model."""
    with _planner(case) as planner:
        peaks = predicted_peaks(planner.sketch, case.batch_size)
        return Prepared(peaks, _plan(planner, case, peaks), planner.sketch.why_real)


def predicted_peaks(sketch: Sketch, batch_size: int) -> dict[str, int]:
    """As `Prepared` has them, of a step with AdamW."""
    peaks = {PLAIN: sketch.step(batch_size).peak_bytes}
    if sketch.blocks(sketch.build()):
        peaks[IN_TURNS] = sketch.step(batch_size, change=_in_turns(sketch.case.blocks)).peak_bytes
    return peaks


def planned(case: Case) -> Plan | str:
    """A plan for half of what recompute saves, or why there is none to make."""
    return prepared(case).plan


def _plan(planner: Planner, case: Case, peaks: Mapping[str, int]) -> Plan | str:
    try:
        find_blocks(planner.sketch.build(), case.blocks)
    except NoBlocks as error:
        return error.in_short
    if peaks[IN_TURNS] >= peaks[PLAIN]:
        return "recomputing every block lowers no peak: something else owns it"
    budget = round(peaks[IN_TURNS] + BETWEEN * (peaks[PLAIN] - peaks[IN_TURNS]))
    try:
        return planner.plan(budget, global_batch=case.batch_size, microbatch=case.batch_size)
    except Infeasible as error:
        return f"no choice fits: {str(error).splitlines()[0]}"


def measured_peak(case: Case, change: Change | None) -> int:
    """The peak of a real step with AdamW."""
    module = case.build()
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    if change is not None:
        change(module)
    lives = record_step(module, case.batch(), case.workload.mean_loss, optimizer=optimizer)
    return timeline_of(lives, type(module).__name__).peak.bytes_alive


def _planner(case: Case) -> Planner:
    """Few options, so that the gate is quick; the techniques' own gates look at the others."""
    return Planner(
        case.workload,
        device=find_profile("h100" if case.device.type == "cuda" else "cpu"),
        dtype=case.dtype,
        blocks=case.blocks,
        chunked_loss=False,
        without=(SAC, OFFLOAD),
        seed=case.seed,
    )


def _in_turns(pattern: str | None) -> Change:
    def change(module: nn.Module) -> None:
        options = {
            name: Option((FULL, REGIONS)[place % 2])
            for place, name in enumerate(find_blocks(module, pattern))
        }
        apply_options(module, options)

    return change


def _alone(plan: Plan) -> Callable[..., list[str]]:
    """The plan's choice for the blocks that a case names."""
    return lambda module, sample: apply_options(
        module, {name: option for name, option in plan.options.items() if name == sample.blocks}
    )
