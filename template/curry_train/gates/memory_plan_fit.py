"""Gates of memory plans: exact estimates, peaks within the budget, the same training.

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

# The model unchanged, and with blocks alternately under full recompute and under regions.
PLAIN = "plain"
IN_TURNS = "full and regions"
# Position of the budget between the peaks of these two.
BETWEEN = 0.5
# On CUDA, where the allocator rounds up and libraries allocate workspaces.
CLOSE = 0.02
Change = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Prepared:
    """Predictions from shapes, which the gates compare with measurements."""

    # The peak of a step as PLAIN and, if the model has blocks, as IN_TURNS.
    peaks: Mapping[str, int]
    # A plan, or why there is none.
    plan: Plan | str
    # Why nothing can be predicted from shapes, or None.
    why_real: str | None


def estimate(case: Case, *, predict: Callable[[Case], Mapping[str, int]] | None = None) -> Verdict:
    """Compare predicted and measured peaks, unchanged and with blocks recomputed alternately."""
    gate = "memory-plan/estimate"
    is_cuda = case.device.type == "cuda"
    required = f"within {CLOSE:.0%}" if is_cuda else "equal to the byte"
    if (why := prepared(case).why_real) is not None:
        return not_applicable(gate, required=required, why=why)

    predicted = prepared(case).peaks if predict is None else predict(case)
    ways = {PLAIN: None, IN_TURNS: _in_turns(case.blocks)}
    pairs = {way: (peak, measured_peak(case, ways[way])) for way, peak in predicted.items()}
    wrong = {
        way: pair
        for way, pair in pairs.items()
        if abs(pair[0] - pair[1]) > (CLOSE * pair[1] if is_cuda else 0)
    }

    reported = (wrong or pairs).items()
    measured = "; ".join(f"{way} {peak:,} of {real:,}" for way, (peak, real) in reported)
    hint = ""
    if wrong:
        hint = "an owner is missing, or an operation allocates other bytes than its shapes give"
    return Verdict(gate, not wrong, measured, required, hint)


def fits(case: Case, *, make: Callable[[Case], Plan | str] | None = None) -> Verdict:
    """Apply a plan for a budget below the plain peak; compare the peak with its prediction."""
    gate = "memory-plan/fits"
    required = "a peak within the budget, as predicted"
    plan = (make or planned)(case)
    if isinstance(plan, str):
        return not_applicable(gate, required=required, why=plan)

    peak = measured_peak(case, plan.apply)
    error = abs(peak - plan.peak_bytes)
    allowed = CLOSE * peak if case.device.type == "cuda" else 0
    held = peak <= plan.budget_bytes and error <= allowed
    measured = f"peak {peak:,}, predicted {plan.peak_bytes:,}, budget {plan.budget_bytes:,}"
    hint = ""
    if not held:
        hint = "the applied options are not those of the plan, or the prediction omits some memory"
    return Verdict(gate, held, measured, required, hint)


def parity(case: Case, *, make: Callable[[Case], Plan | str] | None = None) -> Verdict:
    """Compare loss, gradients, buffers and generators of one step with and without the plan."""
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
    """Compute the predictions for all gates from one sketch of the model."""
    with _planner(case) as planner:
        peaks = predicted_peaks(planner.sketch, case.batch_size)
        return Prepared(peaks, _plan(planner, case, peaks), planner.sketch.why_real)


def predicted_peaks(sketch: Sketch, batch_size: int) -> dict[str, int]:
    """Predict the peaks of `Prepared` for a step with AdamW."""
    peaks = {PLAIN: sketch.step(batch_size).peak_bytes}
    if sketch.blocks(sketch.build()):
        peaks[IN_TURNS] = sketch.step(batch_size, change=_in_turns(sketch.case.blocks)).peak_bytes
    return peaks


def planned(case: Case) -> Plan | str:
    """Return a plan for half of the saving of recompute, or why there is none."""
    return prepared(case).plan


def _plan(planner: Planner, case: Case, peaks: Mapping[str, int]) -> Plan | str:
    try:
        find_blocks(planner.sketch.build(), case.blocks)
    except NoBlocks as error:
        return error.in_short
    if peaks[IN_TURNS] >= peaks[PLAIN]:
        return "recomputing every block does not lower the peak: something else owns it"
    budget = round(peaks[IN_TURNS] + BETWEEN * (peaks[PLAIN] - peaks[IN_TURNS]))
    try:
        return planner.plan(budget, global_batch=case.batch_size, microbatch=case.batch_size)
    except Infeasible as error:
        return f"no plan fits: {str(error).splitlines()[0]}"


def measured_peak(case: Case, change: Change | None) -> int:
    """Measure the peak of a real step with AdamW."""
    module = case.build()
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    if change is not None:
        change(module)
    lives = record_step(module, case.batch(), case.workload.mean_loss, optimizer=optimizer)
    return timeline_of(lives, type(module).__name__).peak.bytes_alive


def _planner(case: Case) -> Planner:
    """Build a planner with few options, for speed; the techniques' gates check the others."""
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
    """Apply the plan's option to the block that a sample names only."""
    return lambda module, sample: apply_options(
        module, {name: option for name, option in plan.options.items() if name == sample.blocks}
    )
