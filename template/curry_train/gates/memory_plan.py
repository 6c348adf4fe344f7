"""Gates of memory-plan: estimates are exact, plans fit, the chunked loss needs few logits.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_memory_plan.py`.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.blocks import NoBlocks
from ..core.generators import seeded
from ..core.measure import Memory, measure_memory
from ..core.measure_compiled import holds_compiled_code
from ..core.parity import OUTER_BOUND, Parity, StepRecord, check_comparable, compare, record_step
from ..plan.optimizers import make_optimizer
from ..plan.planner import Infeasible, Planner
from ..plan.saved import OFFLOAD_KIND, SAC_KIND, Plan, apply_options
from ..plan.shapes import NEEDS_VALUES_ERRORS, pretended
from ..plan.timeline import measure_timeline
from ..primitives.chunked_loss import UnsuitableHead, apply_chunked_loss, chunked_loss_report
from ..primitives.cross_entropy import IGNORED_TARGET
from ..primitives.recompute import recompute_blocks
from ..primitives.strategies import Sample
from ..workloads.workload import Case
from .same_training import Change, check_equal_steps, run_forward, same_training, step_of
from .verdict import Gate, NotApplicable, Outcome, shared

# Gates of the chunked loss: the same training step, and few logits at a time.

# Part of our chunked loss's refusal.
SECOND_DERIVATIVE_ERROR = "can't be differentiated twice"

# Times the difference between a plain step and the same step in float64.
ROUNDING_FACTOR = 2.0
# Of the peak of a head and its loss, without the gradients.
MOST_CHUNKED_SHARE = 0.15
# Tokens that any implementation takes in several chunks, and the most sizes of the head whose
# values are compared over them.
NUM_COMPARED_TOKENS = 2**14
MOST_COMPARED_WIDTH = 64
MOST_COMPARED_CLASSES = 512
NUM_MEASURED_TOKENS = 2**16
# Fewer tokens times this hold less in logits than the gradient of the weight.
TOKENS_PER_WIDTH = 8
# Bytes of tensors with values, where an implementation can't run without them.
ROOM_ON_CPU = 2**31


@dataclass(frozen=True)
class Head:
    """The output layer of a model."""

    name: str
    width: int
    classes: int
    bias: bool


def find_head(case: Case) -> Head:
    """Find the head whose loss can run in chunks; raise `NotApplicable` if there is none."""
    module = case.build()
    try:
        (name,) = apply_chunked_loss(module)
    except UnsuitableHead as error:
        raise NotApplicable(error.in_short) from error
    if holds_compiled_code(module):
        raise NotApplicable(
            "the model is compiled, and compiled code has plain logits: compile after the change"
        )
    try:
        run_forward(case, module)
    except RuntimeError as error:
        if SECOND_DERIVATIVE_ERROR not in str(error):
            raise
        raise NotApplicable(f"the loss takes derivatives: {error}") from error
    use = chunked_loss_report(module)[name]
    if not use.num_chunked or use.whole:
        raise NotApplicable(
            f"the loss is not a cross-entropy on the output of {name} alone ({use})"
        )
    head: Any = module.get_submodule(name)
    return Head(name, head.in_features, head.out_features, head.bias is not None)


def compare_chunked_loss(case: Case, *, apply_chunked_loss: Change = apply_chunked_loss) -> Outcome:
    """Compare a step of the model, and of a head like the model's over many tokens.

    Targets are masked unevenly, so that chunks differ in the number that counts.
    """
    head = find_head(case)
    batch = case.workload.mask(case.batch()) if case.workload.mask else case.batch()
    reference = step_of(case, case.build(), batch)
    check_comparable(reference)
    module = case.build()
    apply_chunked_loss(module, head=head.name)
    candidate = step_of(case, module, batch)
    # Its dtype is a choice of the implementation.
    candidate = replace(candidate, loss=candidate.loss.to(reference.loss.dtype))
    rounding = ROUNDING_FACTOR * _measure_rounding(case, batch, reference)
    tolerance = max(OUTER_BOUND[case.dtype], rounding)
    same = compare(reference, candidate, tolerance=tolerance)
    measured = same.describe()
    if same.holds:
        same = _compare_many_tokens(case, head, apply_chunked_loss)
        measured += f"; over {NUM_COMPARED_TOKENS:,} tokens {same.describe()}"
    hint = ""
    if not same.holds:
        hint = (
            "a term, a divisor or a gradient is missing in some chunk: add up the losses of the "
            "chunks, and divide once by the number of targets that count"
        )
    return measured, f"within {tolerance:.0e}", hint


def _measure_rounding(case: Case, batch: Any, reference: StepRecord) -> float:
    """Return how far the plain step is from the same step in float64.

    Tokens that the model predicts with a probability near 1 have gradients that are small
    differences of it and 1, so float32 may round them by more than its bound.
    """
    precise = replace(case, dtype=torch.float64)
    try:
        step = step_of(precise, case.build().to(precise.dtype), precise.place(batch))
    except (RuntimeError, TypeError):
        # The model or the device computes in other dtypes alone.
        return 0.0
    gradients = {
        name: None if gradient is None else gradient.to(case.dtype)
        for name, gradient in step.gradients.items()
    }
    loss = step.loss.to(reference.loss.dtype)
    return compare(replace(reference, loss=loss, gradients=gradients), reference).worst


def _compare_many_tokens(case: Case, head: Head, apply: Change) -> Parity:
    """Compare the loss over a head like the model's, with and without chunks.

    It is narrower where the model's is wide, to be quick. Half precision runs in float32, because
    `F.cross_entropy` itself would round its sums.
    """
    small = replace(
        head,
        width=min(head.width, MOST_COMPARED_WIDTH),
        classes=min(head.classes, MOST_COMPARED_CLASSES),
    )
    wide = replace(case, dtype=max(case.dtype, torch.float32, key=lambda one: one.itemsize))
    records = (
        record_step(*_make_head(wide, small, change, NUM_COMPARED_TOKENS), _compute_head_loss)
        for change in (_leave_unchanged, apply)
    )
    return compare(*records, tolerance=OUTER_BOUND[wide.dtype])


def _leave_unchanged(module: nn.Module, *, head: str) -> None:
    pass


def _make_head(case: Case, head: Head, change: Change, num_tokens: int) -> tuple[nn.Module, Tensor]:
    """Make a head like the model's, changed, with its input as a parameter, and its targets."""
    options: dict[str, Any] = {"device": case.device, "dtype": case.dtype}
    with seeded(case.seed):
        module = nn.Sequential(nn.Linear(head.width, head.classes, bias=head.bias, **options))
        module.hidden = nn.Parameter(torch.randn(num_tokens, head.width, **options))
        targets = torch.randint(head.classes, (num_tokens,), device=case.device)
    # All of the first tokens are ignored, and some of the next.
    targets[: num_tokens // 4] = IGNORED_TARGET
    targets[: num_tokens // 2 : 3] = IGNORED_TARGET
    change(module, head="0")
    return module, targets


def _compute_head_loss(module: nn.Module, targets: Tensor) -> Tensor:
    return F.cross_entropy(module(module.hidden), targets)


def measure_chunked_memory(
    case: Case, *, apply_chunked_loss: Change = apply_chunked_loss
) -> Outcome:
    """Measure a step of the model's head and a loss, over so many tokens that logits own it."""
    required = f"at most {MOST_CHUNKED_SHARE:.0%} of plain, without the gradients"
    head = find_head(case)

    def measure(change: Change) -> Memory:
        return measure_memory(*_make_head(case, head, change, tokens), _compute_head_loss)

    changes = (_leave_unchanged, apply_chunked_loss)
    tokens = NUM_MEASURED_TOKENS
    found: list[Memory] = []
    if case.device.type != "cuda":
        with contextlib.suppress(*NEEDS_VALUES_ERRORS), pretended():
            found = list(map(measure, changes))
    if not found:
        tokens = _count_tokens_that_fit(case, head)
        found = list(map(measure, changes))
    plain, chunked = found

    # Gradients may be computed in forward, in float32, and be added up out of place in backward.
    itemsize = max(4, case.dtype.itemsize)
    gradients = itemsize * head.width * (tokens + head.classes)
    rest = max(0, chunked.held_bytes - gradients, chunked.peak_bytes - 2 * gradients)
    share = rest / plain.peak_bytes
    sizes = f"{chunked.peak_bytes / 2**20:.1f} of {plain.peak_bytes / 2**20:.1f} MiB"
    measured = f"{share:.1%}; with the gradients a peak of {sizes} at {tokens:,} tokens"
    hint = ""
    if share > MOST_CHUNKED_SHARE:
        hint = (
            "all logits, or all of their gradient, are allocated at once: free each chunk's before "
            "the next"
        )
    return measured, required, hint


def _count_tokens_that_fit(case: Case, head: Head) -> int:
    """Return how many tokens the plain loss can take; raise `NotApplicable` if they are too few."""
    is_cuda = case.device.type == "cuda"
    free = torch.cuda.mem_get_info(case.device)[0] if is_cuda else ROOM_ON_CPU
    bytes_per_token = 32 * head.classes
    fewest = TOKENS_PER_WIDTH * head.width
    if fewest * bytes_per_token > free:
        raise NotApplicable(
            f"the plain loss needs {fewest * bytes_per_token / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; measure on the CPU"
        )
    return min(NUM_MEASURED_TOKENS, free // bytes_per_token)


# Gates of memory plans: exact estimates, peaks within the budget, the same training.

MakePlan = Callable[..., Any]  # takes what `plan` takes

# Position of the budget between the peaks of the plain step and of one that recomputes all blocks.
BUDGET_POSITION = 0.5
# On CUDA, where the allocator rounds up and libraries allocate workspaces.
CUDA_PEAK_TOLERANCE = 0.02


@dataclass(frozen=True)
class Prediction:
    """Predictions from shapes, which the gates compare with measurements."""

    # By name, changes of the model and the peaks of a step with them. One changes nothing; if the
    # model has blocks, others recompute them all and apply the plan.
    changes: Mapping[str, Change]
    peaks: Mapping[str, int]
    # A plan, or why there is none.
    plan: Plan | str
    # Why nothing can be predicted from shapes, or None.
    why_real: str | None


@shared
def predict(case: Case) -> Prediction:
    """Sketch the model and plan for it, once for all gates."""
    # Quick options; the techniques' gates check the others.
    with Planner(
        case.workload,
        device="h100" if case.device.type == "cuda" else "cpu",
        dtype=case.dtype,
        blocks=case.blocks,
        chunked_loss=False,
        without=(SAC_KIND, OFFLOAD_KIND),
        seed=case.seed,
        # Tensors are measured here, not the memory that the allocator reserves.
        by_reserved=False,
    ) as planner:
        sketch = planner.sketch
        size = case.batch_size
        plain = sketch.step(size).peak_bytes
        changes: dict[str, Change] = {"plain": lambda module: None}
        peaks = {"plain": plain}
        plan: Plan | str = "recomputing every block does not lower the peak: something else owns it"
        try:
            # The sketch has chosen blocks if the case names none.
            change = partial(recompute_blocks, blocks=sketch.case.blocks)
            full = sketch.step(size, change=change).peak_bytes
            changes["full recompute"] = change
            peaks["full recompute"] = full
            if full < plain:
                # For half of what recompute saves.
                budget = round(full + BUDGET_POSITION * (plain - full))
                plan = planner.plan(budget, global_batch=size, microbatch=size)
                changes["plan"] = plan.apply
                peaks["plan"] = plan.peak_bytes
        except NoBlocks as error:
            plan = error.in_short
        except Infeasible as error:
            plan = f"no plan fits: {str(error).splitlines()[0]}"
        return Prediction(changes, peaks, plan, sketch.why_real)


def compare_estimate(case: Case) -> Outcome:
    """Compare predicted and measured peaks: plain, with every block recomputed, and planned."""
    required = "equal to the byte"
    tolerance = 0.0
    if case.device.type == "cuda":
        tolerance = CUDA_PEAK_TOLERANCE
        required = f"within {tolerance:.0%}"
    prediction = predict(case)
    if prediction.why_real is not None:
        raise NotApplicable(prediction.why_real)
    # Whether each figure is right.
    found = {}
    for variant, peak in prediction.peaks.items():
        real = measure_real_peak(case, prediction.changes[variant])
        found[f"{variant} {peak:,} of {real:,}"] = abs(peak - real) <= tolerance * real
    hint = ""
    if wrong := [figure for figure, is_right in found.items() if not is_right]:
        check_equal_steps(case)
        hint = "an owner is missing, or an operation allocates other bytes than its shapes give"
    return "; ".join(wrong or found), required, hint


def check_budget(case: Case, *, plan: MakePlan | None = None) -> Outcome:
    """Apply a plan for a budget below the plain peak, by default ours, and measure the peak."""
    ours, chosen = _make_plans(case, plan)
    peak = measure_real_peak(case, chosen.apply)
    hint = ""
    if peak > ours.budget_bytes:
        check_equal_steps(case)
        hint = "the plan frees too little: apply it to every block that it counts on"
    return f"peak {peak:,}, budget {ours.budget_bytes:,}", "a peak within the budget", hint


def _make_plans(case: Case, plan: MakePlan | None) -> tuple[Plan, Any]:
    """Return our plan, and the user's for the same budget; without one, ours twice."""
    ours = predict(case).plan
    if isinstance(ours, str):
        raise NotApplicable(ours)
    if plan is None:
        return ours, ours
    size = case.batch_size
    return ours, plan(case.workload, ours.budget_bytes, global_batch=size, microbatch=size)


def compare_planned_training(case: Case, *, plan: MakePlan | None = None) -> Outcome:
    """Compare a planned training with the plain one; without `plan`, of our plan."""
    ours, chosen = _make_plans(case, plan)

    def apply(module: nn.Module, sample: Sample) -> list[str]:
        chosen.apply(module)
        return list(ours.options)

    def apply_alone(module: nn.Module, sample: Sample) -> list[str]:
        """Apply our plan's option to the block that a sample names."""
        names = ours.options.keys() & {sample.blocks} if plan is None else ()
        return apply_options(module, {name: ours.options[name] for name in names})

    return same_training(case, apply, alone=apply_alone)


def measure_real_peak(
    case: Case, change: Change, *, optimizer: str | None = None, accumulated: bool = False
) -> int:
    """Measure the peak of a real step, by default with the workload's optimizer or AdamW."""
    module = case.build()
    steps = make_optimizer(optimizer or case.workload.optimizer or "adamw", module)
    change(module)
    return measure_timeline(
        module,
        *case.batch_and_loss,
        optimizer=steps,
        accumulated=accumulated,
        keeps_output=case.device.type == "cuda" and case.workload.output_until != "loss",
    ).peak.bytes_alive


GATES = (
    Gate("memory-plan/chunked-loss", compare_chunked_loss),
    Gate("memory-plan/chunked-memory", measure_chunked_memory),
    Gate("memory-plan/estimate", compare_estimate),
    Gate("memory-plan/fits", check_budget),
    Gate("memory-plan/parity-plan", compare_planned_training),
)
