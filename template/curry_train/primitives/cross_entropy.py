"""Cross-entropy of a Linear's output, computed in chunks of tokens.

Only the logits of one chunk exist at a time. Forward computes the gradients of each chunk while its
logits exist, so no matrix product runs twice. It saves only the gradients of inputs, weight and
bias, which backward multiplies by the incoming gradient.

Proof: `python -m pytest tests/primitives/test_chunked_loss.py`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Size of a chunk's float32 logits where no number of tokens is given.
CHUNK_BYTES = 64 * 2**20
REDUCTIONS = ("mean", "sum")
# Dtypes of class indices that F.cross_entropy accepts.
TARGET_DTYPES = (torch.int64, torch.uint8)
# The target that cross_entropy and Hugging Face models leave out of the loss.
IGNORED_TARGET = -100

# Whether backward was called with retain_graph. Private in torch, and used by AOTAutograd.
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


@dataclass(frozen=True)
class ChunkOptions:
    """Resolved settings of one call of `chunked_cross_entropy`."""

    # Tokens per chunk.
    chunk_tokens: int
    # Target that is left out of the loss.
    ignore_index: int
    # "mean" or "sum".
    reduction: str
    # From 0 to 1, as in F.cross_entropy.
    label_smoothing: float
    # Dtype of the matrix products.
    dtype: torch.dtype
    # Which of inputs, weight and bias need a gradient.
    wanted: tuple[bool, bool, bool]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = 1024,
    ignore_index: int = IGNORED_TARGET,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight, bias), targets)` in chunks of tokens.

    `hidden` is (..., width), `weight` (vocabulary, width), and `targets` (...) holds class indices.
    If `chunk_tokens` is None, the float32 logits of a chunk take about 64 MiB. The loss is float32,
    or float64 where `hidden` is.
    """
    dtype = product_dtype(hidden)
    _check(hidden, weight, targets, bias, dtype)
    check_chunk_tokens(chunk_tokens)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction must be one of {REDUCTIONS}, got {reduction!r}; "
            "a loss for each token is not supported"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}")

    inputs = hidden.reshape(-1, hidden.shape[-1])
    needs = [
        torch.is_grad_enabled() and given is not None and given.requires_grad
        for given in (inputs, weight, bias)
    ]

    options = ChunkOptions(
        chunk_tokens=rows_of_chunk(weight.shape[0]) if chunk_tokens is None else chunk_tokens,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        dtype=dtype,
        wanted=(needs[0], needs[1], needs[2]),
    )
    flat_targets = targets.reshape(-1).long()
    if not any(needs):
        return _run(inputs, weight, bias, flat_targets, options)[0]
    loss: Tensor = _Chunked.apply(inputs, weight, bias, flat_targets, options)
    return loss


def check_chunk_tokens(chunk_tokens: int | None) -> None:
    """Raise an error unless `chunk_tokens` is a positive whole number or None."""
    is_whole = isinstance(chunk_tokens, int) and not isinstance(chunk_tokens, bool)
    if chunk_tokens is not None and not (is_whole and chunk_tokens >= 1):
        raise ValueError(
            "chunk_tokens must be a whole number of at least 1, or None for 64 MiB, "
            f"got {chunk_tokens!r}"
        )


def refuse_second_derivative() -> None:
    """Raise an error in a custom backward that runs with create_graph=True.

    torch's `once_differentiable` is not enough: where the loss is the last operation, it returns a
    second derivative of zero without an error.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a chunked loss can't be differentiated twice, which create_graph=True requires: "
            "call remove_chunked_loss, and use F.cross_entropy on the logits"
        )


def rows_of_chunk(width: int) -> int:
    """Return how many rows of this width fit into 64 MiB of float32, at least 1."""
    return max(1, CHUNK_BYTES // (4 * width))


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which `F.linear` would compute here, with autocast considered."""
    device_type = hidden.device.type
    autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
        device_type
    )
    if autocast and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
        raise ValueError(
            f"{shapes} do not fit: hidden must be (..., width) and weight (vocabulary, width)"
        )
    if targets.dtype not in TARGET_DTYPES:
        raise ValueError(
            f"targets must be class indices (torch.int64), got {targets.dtype}: convert with "
            ".long(), or use F.cross_entropy for class probabilities"
        )
    if targets.shape != hidden.shape[:-1]:
        shapes = f"targets {tuple(targets.shape)}, hidden {tuple(hidden.shape)}"
        raise ValueError(
            f"{shapes}: one target per row of hidden is needed, "
            f"so targets of {tuple(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be ({weight.shape[0]},), one number per row of weight, "
            f"got {tuple(bias.shape)}"
        )
    others = {given.dtype for given in (weight, bias) if given is not None}
    if not hidden.is_floating_point() or (dtype == hidden.dtype and others != {dtype}):
        raise ValueError(
            f"hidden is {hidden.dtype}, weight and bias are {', '.join(map(str, others))}: they "
            "must have the same floating-point dtype; cast one of them, or use autocast"
        )


def _run(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: ChunkOptions
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the loss, the divisor of the gradients, and the gradients of the summed loss."""
    exact = torch.float64 if inputs.dtype is torch.float64 else torch.float32
    sources = ((inputs, inputs.dtype), (weight, exact), (bias, exact))
    gradients = [
        source.new_zeros(source.shape, dtype=dtype) if source is not None and wanted else None
        for (source, dtype), wanted in zip(sources, options.wanted, strict=True)
    ]
    total = inputs.new_zeros((), dtype=exact)

    device_type = inputs.device.type
    without_autocast = (
        torch.autocast(device_type, enabled=False)
        if torch.amp.is_autocast_available(device_type)
        else contextlib.nullcontext()
    )
    with torch.no_grad(), without_autocast:
        weight = weight.to(options.dtype)
        bias = None if bias is None else bias.to(options.dtype)
        for start in range(0, len(targets), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            rows = inputs[chunk].to(options.dtype)
            logits = F.linear(rows, weight, bias).to(exact)
            total += _loss(logits, targets[chunk], options)
            if any(options.wanted):
                # `_loss` has replaced the logits by their gradient.
                _add_gradients(gradients, chunk, logits, rows, weight)
            # Free this chunk's logits before the next chunk's are allocated.
            del logits
        count = (targets != options.ignore_index).sum().to(exact)

    if options.reduction == "sum":
        return total, torch.ones_like(count), gradients
    return total / count, count.clamp(min=1), gradients


def _loss(logits: Tensor, targets: Tensor, options: ChunkOptions) -> Tensor:
    """Sum the loss over a chunk; if gradients are wanted, overwrite the logits with theirs."""
    classes = logits.shape[-1]
    smoothing = options.label_smoothing
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
    gradients: list[Tensor | None],
    chunk: slice,
    logits_gradient: Tensor,
    rows: Tensor,
    weight: Tensor,
) -> None:
    """Add a chunk's gradients with the two products of a plain backward.

    The gradients of weight and bias are accumulated in float32 or float64.
    """
    inputs_gradient, weight_gradient, bias_gradient = gradients
    if bias_gradient is not None:
        bias_gradient += logits_gradient.sum(0)

    logits_gradient = logits_gradient.to(rows.dtype)
    if inputs_gradient is not None:
        inputs_gradient[chunk] = logits_gradient @ weight
    if weight_gradient is not None and weight_gradient.dtype == rows.dtype:
        torch.addmm(weight_gradient, logits_gradient.t(), rows, out=weight_gradient)
    elif weight_gradient is not None:
        weight_gradient += logits_gradient.t() @ rows


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: ChunkOptions,
    ) -> Any:
        loss, divisor, gradients = _run(inputs, weight, bias, targets, options)
        ctx.save_for_backward(divisor, *gradients)
        # As many elements as a chunk's logits have.
        ctx.block = options.chunk_tokens * weight.shape[0]
        ctx.dtypes = [None if source is None else source.dtype for source in (inputs, weight, bias)]
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative()
        divisor, *saved = ctx.saved_tensors
        factor = gradient / divisor
        in_place = not graph_is_kept()
        scaled = [
            None
            if unscaled is None
            else _scaled(unscaled, factor, dtype, in_place=in_place, block=ctx.block)
            for unscaled, dtype in zip(saved, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _scaled(
    unscaled: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool, block: int
) -> Tensor:
    """Multiply a saved gradient by the factor, in the factor's dtype and in place if possible.

    A bfloat16 factor would be off by 1 part in 500 for the whole gradient, and a float16 factor may
    be infinite.
    """
    reuse = in_place and unscaled.dtype == dtype
    result = unscaled if reuse else torch.empty_like(unscaled, dtype=dtype)
    if unscaled.dtype == dtype == factor.dtype:
        return torch.mul(unscaled, factor, out=result)

    rows = max(1, block // max(1, unscaled[:1].numel()))
    for source, target in zip(unscaled.split(rows), result.split(rows), strict=True):
        target.copy_(source.to(factor.dtype, copy=True).mul_(factor))
    return result
