"""What is estimated from shapes is what a step takes, and a plan fits its budget and trains the same model.

Proof: `python -m pytest tests/test_memory_plan_fit.py`.
"""

import functools
from collections.abc import Callable

from torch import nn

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

BETWEEN = 0.5  # where the budget stands between the least peak and the plain one
CLOSE = 0.02  # on CUDA, where the allocator rounds and libraries take workspaces
Change = Callable[[nn.Module], object]
Predict = Callable[[Sketch, int, Change | None], int]


def predicted_peak(sketch: Sketch, batch_size: int, change: Change | None) -> int:
    """The peak of a step with AdamW, from shapes."""
    return sketch.step(batch_size, change=change).peak_bytes


def estimate(case: Case, *, predict: Predict = predicted_peak) -> Verdict:
    """A step as it is, and one whose blocks are recomputed whole and by regions in turns: predicted and measured."""
    gate, cuda = "memory-plan/estimate", case.device.type == "cuda"
    required = f"within {CLOSE:.0%}" if cuda else "equal to the byte"
    with _sketch(case) as sketch:
        if sketch.why_real is not None:
            return not_applicable(gate, required=required, why=sketch.why_real)
        blocks = list(sketch.blocks(sketch.build()))
        ways = {"plain": None} | ({"full and regions": _in_turns(blocks)} if blocks else {})
        predicted = {way: predict(sketch, case.batch_size, change) for way, change in ways.items()}
    pairs = {way: (predicted[way], measured_peak(case, change)) for way, change in ways.items()}
    wrong = {way: pair for way, pair in pairs.items() if abs(pair[0] - pair[1]) > (CLOSE * pair[1] if cuda else 0)}
    told = (wrong or pairs).items()
    measured = "; ".join(f"{way} {ours:,} of {theirs:,}" for way, (ours, theirs) in told)
    hint = "" if not wrong else "an owner is forgotten, or an operation takes other bytes than its shapes say"
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
    hint = "" if held else "the plan is not what runs, or the chain's arithmetic leaves something out"
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


@functools.lru_cache(maxsize=2)
def planned(case: Case) -> Plan | str:
    """A plan for half of what recompute can save, or why there is none to make. Two gates ask for it."""
    planner = _planner(case)
    with planner:
        plain = planner.sketch.step(case.batch_size).peak_bytes
        blocks = planner.sketch.blocks(planner.sketch.build())
        if not blocks:
            return "the model repeats no block: name some with --blocks"
        least = planner.sketch.step(case.batch_size, change=_whole(list(blocks), FULL)).peak_bytes
        if least >= plain:
            return "recomputing whole blocks lowers no peak: something else owns it"
        budget = round(least + BETWEEN * (plain - least))
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


def _sketch(case: Case) -> Sketch:
    kernels = "cuda" if case.device.type == "cuda" else "cpu"
    return Sketch(case.workload, dtype=case.dtype, kernels=kernels, blocks=case.blocks, seed=case.seed)


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


def _whole(blocks: list[str], kind: str) -> Change:
    return lambda module: apply_options(module, dict.fromkeys(blocks, Option(kind)))


def _in_turns(blocks: list[str]) -> Change:
    options = {name: Option((FULL, REGIONS)[place % 2]) for place, name in enumerate(blocks)}
    return lambda module: apply_options(module, options)


def _alone(plan: Plan) -> Callable[..., list[str]]:
    """The plan's choice for the blocks that a case names."""
    return lambda module, sample: apply_options(
        module, {name: option for name, option in plan.options.items() if name == sample.blocks}
    )
