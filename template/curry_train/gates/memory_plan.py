"""The levers that a memory plan takes beside recompute do what the plan counts on, and train the same model.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one. Proof:
`python -m pytest tests/test_memory_plan.py`.
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
ROUNDING = 2.0  # of the distance between a step in half precision and the same in float32
AT_MOST = 0.15  # of the peak of a head and its loss, beside the gradients, which every loss makes
TOKENS_PER_WIDTH, CHUNKS = (
    8,
    16,
)  # logits of eight times the weight's size own the peak, a sixteenth of them does not


def chunked_loss(case: Case, *, apply: ApplyToHead = apply_chunked_loss) -> Verdict:
    """Loss and gradients of one step, with targets left out unevenly, and the products that it runs."""
    gate, batch = "memory-plan/chunked-loss", _masked(case, case.batch())
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
            "a product of the head runs again: compute gradients while a chunk's logits are there"
        )
    elif flops.forward <= plain_flops.forward:
        hint = "forward computes no gradient, so the logits stay whole: is the head's output what the loss takes?"
    more = flops.total - plain_flops.total
    measured = f"{same.describe()}; {more:,} FLOPs more, {flops.forward - plain_flops.forward:,} moved to forward"
    return Verdict(gate, not hint, measured, f"within {tolerance:.0e}, none more, some moved", hint)


def chunked_memory(case: Case, *, apply: ApplyToHead = apply_chunked_loss) -> Verdict:
    """Peak bytes of the model's head and a loss on it, at so many tokens that the logits own them."""
    gate, required = (
        "memory-plan/chunked-memory",
        f"at most {AT_MOST:.0%} of plain, beside the gradients",
    )
    found = _find_head(case)
    if isinstance(found, str):
        return not_applicable(gate, required=required, why=found)
    tokens = TOKENS_PER_WIDTH * max(found.width, CHUNKS)
    if case.device.type == "cuda":
        free, needed = torch.cuda.mem_get_info(case.device)[0], 16 * tokens * found.classes
        if needed > free:
            why = f"the plain loss needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free; measure on the CPU"
            return not_applicable(gate, required=required, why=why)
    peaks = []
    with contextlib.nullcontext() if case.device.type == "cuda" else pretended():
        for chunked in (False, True):
            head = nn.Linear(
                found.width, found.classes, bias=found.bias, device=case.device, dtype=case.dtype
            )
            module = nn.Sequential(head)
            if chunked:
                apply(module, head="0", chunk_tokens=tokens // CHUNKS)
            hidden = torch.zeros(
                tokens, found.width, device=case.device, dtype=case.dtype, requires_grad=True
            )
            targets = torch.zeros(tokens, device=case.device, dtype=torch.int64)
            peaks.append(measure_memory(module, (hidden, targets), _head_loss).peak_bytes)
    plain, peak = peaks
    summed = case.dtype.itemsize + (
        4 if case.dtype in HALVES else 0
    )  # the weight's, in float32 before it is rounded
    gradients = tokens * found.width * case.dtype.itemsize + found.width * found.classes * summed
    part = (peak - gradients) / plain
    held = part <= AT_MOST
    sizes = f"{peak / 2**20:.1f} of {plain / 2**20:.1f} MiB"
    measured = f"{part:.1%}; with the gradients {peak / plain:.0%}: {sizes} at {tokens:,} tokens"
    hint = (
        ""
        if held
        else "all logits, or all of their gradient, exist at once: one chunk's are to be freed before the next"
    )
    return Verdict(gate, held, measured, required, hint)


GATES = (
    Gate("memory-plan/chunked-loss", chunked_loss),
    Gate("memory-plan/chunked-memory", chunked_memory),
)


@dataclass(frozen=True)
class Head:
    """A model's output layer, and how many tokens go through it in a step."""

    width: int
    classes: int
    bias: bool
    tokens: int


def _find_head(case: Case) -> Head | str:
    """The one head whose loss can run in chunks, or why there is none."""
    module, rows = case.build(), list[int]()
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
        return f"the loss is no cross-entropy on the output of {name} alone: {use}"
    return Head(head.in_features, head.out_features, head.bias is not None, sum(rows))


def _masked(case: Case, batch: Any) -> Any:
    return case.workload.mask(batch) if case.workload.mask else batch


def _step(case: Case, batch: Any, apply: Callable[[nn.Module], Any] = lambda module: None) -> Any:
    module, loss = case.build(), case.workload.mean_loss
    apply(module)
    with seeded(case.seed):
        record = record_step(module, batch, loss)
    return record, count_flops(module, batch, loss)


def _in_float32(case: Case, batch: Any, reference: StepRecord) -> StepRecord:
    """The reference's loss and gradients from the same weights computed in float32, rounded where they end."""
    module = case.build().float()
    with seeded(case.seed):
        step = record_step(
            module, replace(case, dtype=torch.float32).place(batch), case.workload.mean_loss
        )
    gradients = {
        name: None if kept is None else kept.to(case.dtype) for name, kept in step.gradients.items()
    }
    return replace(reference, loss=step.loss.to(reference.loss.dtype), gradients=gradients)


def _head_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden, targets = batch
    return token_loss(module(hidden), targets) / len(targets)
