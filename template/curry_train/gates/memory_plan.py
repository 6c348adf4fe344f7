"""Gates of the chunked loss: the same training step, at a lower peak.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one.

Proof: `python -m pytest tests/test_memory_plan.py`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.adapt import token_loss
from ..core.fake import pretended
from ..core.measure import count_flops, measure_memory
from ..core.parity import StepRecord, compare, record_step
from ..core.untouched import seeded, untouched
from ..core.verdict import Gate, Verdict, not_applicable
from ..core.workload import Case
from ..plan.same_training import OUTER_BOUND
from ..primitives.chunked_loss import apply_chunked_loss, chunked_loss_report

ApplyToHead = Callable[..., list[str]]  # takes what apply_chunked_loss takes
HALVES = (torch.bfloat16, torch.float16)
# Times the difference between a step in half precision and the same step in float32.
ROUNDING = 2.0
# Of the peak of a head and its loss, without the gradients, which every loss allocates.
AT_MOST = 0.15
# Logits of eight times the weight's size own the peak; a sixteenth of them does not.
TOKENS_PER_WIDTH = 8
CHUNKS = 16


def chunked_loss(case: Case, *, apply: ApplyToHead = apply_chunked_loss) -> Verdict:
    """Compare loss, gradients and FLOPs of one step with unevenly masked targets."""
    gate = "memory-plan/chunked-loss"
    batch = _masked(case, case.batch())
    found = _find_head(case)
    if isinstance(found, str):
        return not_applicable(gate, required="the same step", why=found)

    chunk = max(1, found.tokens * 2 // 5)  # two chunks and a shorter one
    reference, plain_flops = _step(case, batch)
    candidate, flops = _step(case, batch, lambda module: apply(module, chunk_tokens=chunk))
    tolerance = OUTER_BOUND[case.dtype]
    if case.dtype in HALVES:
        tolerance = max(
            tolerance, ROUNDING * compare(_in_float32(case, batch, reference), reference).worst
        )
    same = compare(reference, candidate, tolerance=tolerance)
    hint = ""
    if not same.holds:
        hint = f"{same.describe()}: a term, a divisor or a gradient is missing in some chunk"
    elif flops.total > plain_flops.total:
        hint = (
            "a product of the head runs again: compute the gradients while a chunk's logits are "
            "allocated"
        )
    elif flops.forward <= plain_flops.forward:
        hint = (
            "forward computes no gradient, so the logits stay whole: check that the loss takes the "
            "head's output"
        )
    num_added = flops.total - plain_flops.total
    num_moved = flops.forward - plain_flops.forward
    measured = f"{same.describe()}; {num_added:,} FLOPs added, {num_moved:,} moved to forward"
    required = f"within {tolerance:.0e}, no FLOPs added, some moved"
    return Verdict(gate, not hint, measured, required, hint)


def chunked_memory(case: Case, *, apply: ApplyToHead = apply_chunked_loss) -> Verdict:
    """Measure the peak of the model's head and a loss, with enough tokens that logits own it."""
    gate = "memory-plan/chunked-memory"
    required = f"at most {AT_MOST:.0%} of plain, without the gradients"
    found = _find_head(case)
    if isinstance(found, str):
        return not_applicable(gate, required=required, why=found)

    is_cuda = case.device.type == "cuda"
    tokens = TOKENS_PER_WIDTH * max(found.width, CHUNKS)
    if is_cuda:
        free = torch.cuda.mem_get_info(case.device)[0]
        needed = 16 * tokens * found.classes
        if needed > free:
            why = (
                f"the plain loss needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are "
                "free; measure on the CPU"
            )
            return not_applicable(gate, required=required, why=why)

    with contextlib.nullcontext() if is_cuda else pretended():
        plain = _head_peak(case, found, tokens)
        peak = _head_peak(case, found, tokens, apply=apply)

    # The gradient of a half-precision weight is summed in float32 before it is rounded.
    weight_itemsize = case.dtype.itemsize
    if case.dtype in HALVES:
        weight_itemsize += 4
    gradients = tokens * found.width * case.dtype.itemsize
    gradients += found.width * found.classes * weight_itemsize

    share = (peak - gradients) / plain
    held = share <= AT_MOST
    sizes = f"{peak / 2**20:.1f} of {plain / 2**20:.1f} MiB"
    measured = f"{share:.1%}; with the gradients {peak / plain:.0%}: {sizes} at {tokens:,} tokens"
    hint = ""
    if not held:
        hint = (
            "all logits, or all of their gradient, are allocated at once: free each chunk's before "
            "the next"
        )
    return Verdict(gate, held, measured, required, hint)


GATES = (
    Gate("memory-plan/chunked-loss", chunked_loss),
    Gate("memory-plan/chunked-memory", chunked_memory),
)


@dataclass(frozen=True)
class Head:
    """The output layer of a model and its number of tokens per step."""

    width: int
    classes: int
    bias: bool
    tokens: int


def _head_peak(case: Case, head: Head, tokens: int, *, apply: ApplyToHead | None = None) -> int:
    """Measure the peak of a head of this shape and its loss, with chunks if `apply` is given."""
    linear = nn.Linear(
        head.width, head.classes, bias=head.bias, device=case.device, dtype=case.dtype
    )
    module = nn.Sequential(linear)
    if apply is not None:
        apply(module, head="0", chunk_tokens=tokens // CHUNKS)
    hidden = torch.zeros(
        tokens, head.width, device=case.device, dtype=case.dtype, requires_grad=True
    )
    targets = torch.zeros(tokens, device=case.device, dtype=torch.int64)
    return measure_memory(module, (hidden, targets), _head_loss).peak_bytes


def _find_head(case: Case) -> Head | str:
    """Find the head whose loss can run in chunks, or return why there is none."""
    module = case.build()
    rows = list[int]()
    try:
        (name,) = apply_chunked_loss(module)
    except ValueError as error:
        return str(error).split(";")[0]
    head: Any = module.get_submodule(name)
    head.register_forward_pre_hook(lambda _, args: rows.append(args[0].numel() // head.in_features))
    with untouched(module), seeded(case.seed):
        case.workload.mean_loss(module, case.batch())
    use = chunked_loss_report(module)[name]
    if not use.num_chunked or use.whole:
        return f"the loss is not a cross-entropy on the output of {name} alone: {use}"
    return Head(head.in_features, head.out_features, head.bias is not None, sum(rows))


def _masked(case: Case, batch: Any) -> Any:
    return case.workload.mask(batch) if case.workload.mask else batch


def _step(case: Case, batch: Any, apply: Callable[[nn.Module], Any] = lambda module: None) -> Any:
    module = case.build()
    loss = case.workload.mean_loss
    apply(module)
    with seeded(case.seed):
        record = record_step(module, batch, loss)
    return record, count_flops(module, batch, loss)


def _in_float32(case: Case, batch: Any, reference: StepRecord) -> StepRecord:
    """Compute the reference step in float32 and round the loss and gradients at the end."""
    module = case.build().float()
    with seeded(case.seed):
        step = record_step(
            module, replace(case, dtype=torch.float32).place(batch), case.workload.mean_loss
        )
    gradients = {
        name: None if gradient is None else gradient.to(case.dtype)
        for name, gradient in step.gradients.items()
    }
    return replace(reference, loss=step.loss.to(reference.loss.dtype), gradients=gradients)


def _head_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden, targets = batch
    return token_loss(module(hidden), targets) / len(targets)
