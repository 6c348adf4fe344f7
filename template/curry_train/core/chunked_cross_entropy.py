"""Cross-entropy of a Linear's output, of which the logits of one chunk of tokens exist at a time.

The gradients are computed chunk by chunk in forward, while the chunk's logits are there, so that no product runs again.
Kept for backward are the gradients alone, of the inputs, the weight and the bias, without the factor that backward
brings. Proof: `python -m pytest tests/test_chunked_loss.py`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 64 * 2**20  # of float32 logits, where no number of tokens is given
REDUCTIONS = ("mean", "sum")
TARGETS = (torch.int64, torch.uint8)  # those that F.cross_entropy takes

# Of torch's own, as AOTAutograd asks it: whether backward was called with retain_graph.
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


@dataclass(frozen=True)
class Options:
    """What a call asks for; `wanted` says which of inputs, weight and bias get a gradient, `dtype` is the products'."""

    chunk_tokens: int
    ignore_index: int
    reduction: str
    label_smoothing: float
    dtype: torch.dtype
    wanted: tuple[bool, bool, bool]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = 1024,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), targets)`, a chunk of tokens at a time.

    `hidden` is (..., width), `weight` (vocabulary, width), `targets` (...) the indices of classes. Without
    `chunk_tokens` the float32 logits of a chunk are about 64 MiB. The loss is float32, or float64 where `hidden` is.
    """
    dtype = product_dtype(hidden)
    _check(hidden, weight, targets, bias, dtype)
    check_chunk_tokens(chunk_tokens)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction must be one of {REDUCTIONS}, got {reduction!r}: a loss per token is as many losses"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}")
    inputs = hidden.reshape(-1, hidden.shape[-1])
    needs = [
        torch.is_grad_enabled() and given is not None and given.requires_grad
        for given in (inputs, weight, bias)
    ]
    options = Options(
        chunk_tokens=rows_of_chunk(weight.shape[0]) if chunk_tokens is None else chunk_tokens,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        dtype=dtype,
        wanted=(needs[0], needs[1], needs[2]),
    )
    flat = targets.reshape(-1).long()
    if not any(needs):
        return _run(inputs, weight, bias, flat, options)[0]
    loss: Tensor = _Chunked.apply(inputs, weight, bias, flat, options)
    return loss


def check_chunk_tokens(chunk_tokens: int | None) -> None:
    """Refuse what is not a number of tokens."""
    whole = isinstance(chunk_tokens, int) and not isinstance(chunk_tokens, bool)
    if chunk_tokens is not None and not (whole and chunk_tokens >= 1):
        raise ValueError(
            f"chunk_tokens must be a whole number of at least 1, or None for 64 MiB, got {chunk_tokens!r}"
        )


def refuse_second_derivative() -> None:
    """For use in a backward; `once_differentiable` lets a second derivative pass as zero where the loss is the end."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a loss in chunks can't be differentiated twice, and create_graph=True asks for it: use F.cross_entropy of "
            "the logits there, after remove_chunked_loss"
        )


def rows_of_chunk(width: int) -> int:
    """How many rows of this width are 64 MiB in float32."""
    return max(1, CHUNK_BYTES // (4 * width))


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which `F.linear` would compute here, autocast or not."""
    kind = hidden.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return (
        torch.get_autocast_dtype(kind)
        if autocast and hidden.dtype is not torch.float64
        else hidden.dtype
    )


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
        raise ValueError(
            f"{shapes} do not fit: hidden must be (..., width) and weight (vocabulary, width)"
        )
    if targets.dtype not in TARGETS:
        raise ValueError(
            f"targets must be indices of classes (torch.int64), got {targets.dtype}: convert with .long(), or use "
            "F.cross_entropy for class probabilities"
        )
    if targets.shape != hidden.shape[:-1]:
        shapes = f"targets {tuple(targets.shape)}, hidden {tuple(hidden.shape)}"
        raise ValueError(
            f"{shapes}: one target per row of hidden is needed, so targets of {tuple(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be ({weight.shape[0]},), one number per row of weight, got {tuple(bias.shape)}"
        )
    others = {given.dtype for given in (weight, bias) if given is not None}
    if not hidden.is_floating_point() or (dtype == hidden.dtype and others != {dtype}):
        raise ValueError(
            f"hidden is {hidden.dtype}, weight and bias are {', '.join(map(str, others))}: they must be of one "
            "floating-point dtype; cast one of them, or use autocast"
        )


def _run(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: Options
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The loss, what its gradients are still to be divided by, and the gradients of the sum where they are wanted."""
    exact = torch.float64 if inputs.dtype is torch.float64 else torch.float32
    kind = inputs.device.type
    shapes = ((inputs, inputs.dtype), (weight, exact), (bias, exact))
    gradients = [
        given.new_zeros(given.shape, dtype=dtype) if given is not None and wanted else None
        for (given, dtype), wanted in zip(shapes, options.wanted, strict=True)
    ]
    total = inputs.new_zeros((), dtype=exact)
    plain = (
        torch.autocast(kind, enabled=False)
        if torch.amp.is_autocast_available(kind)
        else contextlib.nullcontext()
    )
    with torch.no_grad(), plain:
        weight = weight.to(options.dtype)
        bias = None if bias is None else bias.to(options.dtype)
        for start in range(0, len(targets), options.chunk_tokens):
            part = slice(start, start + options.chunk_tokens)
            rows = inputs[part].to(options.dtype)
            logits = F.linear(rows, weight, bias).to(exact)
            total += _loss(logits, targets[part], options)  # and the logits are the gradient now
            if any(options.wanted):
                _add_gradients(gradients, part, logits, rows, weight)
            del logits  # before the next chunk's are made
        count = (targets != options.ignore_index).sum().to(exact)
    if options.reduction == "sum":
        return total, torch.ones_like(count), gradients
    return total / count, count.clamp(min=1), gradients


def _loss(logits: Tensor, targets: Tensor, options: Options) -> Tensor:
    """The sum over a chunk; where gradients are wanted it writes that of the logits over them."""
    classes, smoothing = logits.shape[-1], options.label_smoothing
    ignored = targets == options.ignore_index
    index = targets.masked_fill(ignored, 0)[:, None]
    logits -= logits.amax(-1, keepdim=True)
    loss = logits.gather(1, index) * (smoothing - 1)
    if smoothing:
        loss -= logits.sum(-1, keepdim=True) * (smoothing / classes)
    norm = logits.exp_().sum(-1, keepdim=True)
    loss += norm.log()
    if any(options.wanted):
        logits /= norm
        at_target = logits.gather(1, index) - (1 - smoothing)
        logits.scatter_(1, index, at_target)
        if smoothing:
            logits -= smoothing / classes
        logits.masked_fill_(ignored[:, None], 0)
    return loss.masked_fill_(ignored[:, None], 0).sum()


def _add_gradients(
    gradients: list[Tensor | None], part: slice, slopes: Tensor, rows: Tensor, weight: Tensor
) -> None:
    """Two products, as in a plain backward; the weight's and the bias's are summed in float32 at least."""
    of_inputs, of_weight, of_bias = gradients
    if of_bias is not None:
        of_bias += slopes.sum(0)
    slopes = slopes.to(rows.dtype)
    if of_inputs is not None:
        of_inputs[part] = slopes @ weight
    if of_weight is not None and of_weight.dtype == rows.dtype:
        torch.addmm(of_weight, slopes.t(), rows, out=of_weight)
    elif of_weight is not None:
        of_weight += slopes.t() @ rows


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: Options,
    ) -> Any:
        loss, divisor, gradients = _run(inputs, weight, bias, targets, options)
        ctx.save_for_backward(divisor, *gradients)
        ctx.block = options.chunk_tokens * weight.shape[0]  # as many numbers as a chunk's logits
        ctx.dtypes = [None if given is None else given.dtype for given in (inputs, weight, bias)]
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative()
        divisor, *saved = ctx.saved_tensors
        factor, last = gradient / divisor, not graph_is_kept()
        found = [
            None if kept is None else _scaled(kept, factor, dtype, in_place=last, block=ctx.block)
            for kept, dtype in zip(saved, ctx.dtypes, strict=True)
        ]
        return *found, None, None


def _scaled(
    kept: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool, block: int
) -> Tensor:
    """Times the factor in the factor's dtype: a bfloat16 factor would be off by a part in 500, for the whole gradient,
    and a float16 one may be infinite. What is not needed again is written over."""
    result = kept if in_place and kept.dtype == dtype else torch.empty_like(kept, dtype=dtype)
    if kept.dtype == dtype == factor.dtype:
        return torch.mul(kept, factor, out=result)
    rows = max(1, block // max(1, kept[:1].numel()))
    for source, target in zip(kept.split(rows), result.split(rows), strict=True):
        target.copy_(source.to(factor.dtype, copy=True).mul_(factor))
    return result
