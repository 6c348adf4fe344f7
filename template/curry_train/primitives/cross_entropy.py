"""Cross-entropy of a Linear's output, computed in chunks of tokens.

    loss = chunked_cross_entropy(hidden, head.weight, targets, z_loss=1e-4)
    log_probabilities = chunked_log_probabilities(hidden, head.weight, targets)

Only the logits of one chunk exist at a time. Forward computes the gradients of each chunk while its
logits exist, so no matrix product runs twice. It saves only the gradients of inputs, weight and
bias, which backward multiplies by the incoming gradient. A loss per token is the exception: its
incoming gradients differ, so backward computes the logits again. Ignored tokens cost no product.

Proof: `python -m pytest tests/primitives/test_chunked_loss.py`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .autocast import autocast_as, autocast_now

# A chunk's logits and their copies take at most this, where no size is given.
CHUNK_BYTES = 64 * 2**20
# A chunk may have a quarter as many tokens as the head is wide, whatever they take: each chunk
# reads the weight twice, and reads and writes its gradient.
TOKENS_PER_WIDTH = 1 / 4
# Logits also take at most half as much as the gradients, but have at least this many tokens.
FEWEST_CHUNK_TOKENS = 16
REDUCTIONS = ("mean", "sum", "none")
# Value of `token_weights` that weights each token by its own probability, as a constant.
PROBABILITY_WEIGHTS = "probability"
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
    # Whether each token has a loss; else they are added up.
    per_token: bool
    # From 0 to 1, as in F.cross_entropy.
    label_smoothing: float
    # Factor of the squared log-sum-exp that is added to each token's loss.
    z_loss: float
    # Limit of the logits' magnitude, or None.
    softcap: float | None
    # Whether each token's loss is multiplied by the target's probability, as a constant.
    weighted_by_probability: bool
    # Dtype of the matrix products.
    dtype: torch.dtype
    # Which of inputs, weight and bias need a gradient.
    wanted: tuple[bool, ...]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    ignore_index: int = IGNORED_TARGET,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | str | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight, bias), targets)` in chunks of tokens.

    `hidden` is (..., width), `weight` (vocabulary, width), and `targets` (...) holds class indices.
    The loss is float32, or float64 where `hidden` is; with `reduction="none"` it has the shape of
    the targets. `class_weights` is the `weight` of `F.cross_entropy`, and `softcap=c` replaces the
    logits by `c * tanh(logits / c)`. To each token's loss `z_loss * logsumexp(logits) ** 2` is
    added, and the sum is multiplied by its `token_weights`: a tensor like the targets, or
    "probability" for the probability of the target, as a constant. A mean divides as
    `F.cross_entropy` does, whatever the token weights are.

    A chunk has `chunk_tokens` tokens, or a quarter as many as the hidden width, or more if they
    take, with the copies of their logits, at most 64 MiB; and at most half of the gradients' bytes.
    """
    _check(hidden, weight, targets, bias)
    check_chunk_size(chunk_tokens)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    limited = softcap is None or 0 < softcap < math.inf
    if not (0 <= label_smoothing <= 1 and 0 <= z_loss < math.inf and limited):
        raise ValueError(
            "label_smoothing is from 0 to 1, z_loss at least 0, softcap above 0 or None, and all "
            f"are finite; got {label_smoothing!r}, {z_loss!r} and {softcap!r}"
        )
    _check_weights("class_weights", class_weights, weight.shape[:1])
    _check_weights("token_weights", token_weights, targets.shape)

    flat_weights = token_weights.reshape(-1) if isinstance(token_weights, Tensor) else None
    flat_targets = targets.reshape(-1).long()
    sources = hidden.reshape(-1, hidden.shape[-1]), weight, bias
    wanted = tuple(
        torch.is_grad_enabled() and source is not None and source.requires_grad
        for source in sources
    )
    dtype = product_dtype(hidden)
    if chunk_tokens is None:
        chunk_tokens = _count_fitting_rows(sources, wanted, dtype, is_capped=softcap is not None)
    options = ChunkOptions(
        chunk_tokens=chunk_tokens,
        ignore_index=ignore_index,
        per_token=reduction == "none",
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        weighted_by_probability=isinstance(token_weights, str),
        dtype=dtype,
        wanted=wanted,
    )
    loss: Tensor = _Chunked.apply(*sources, flat_targets, class_weights, flat_weights, options)
    if reduction == "mean":
        # The mean is over the counted tokens, weighted by the weights of their classes.
        counted = flat_targets != ignore_index
        weights = counted.to(loss)
        if class_weights is not None:
            weights = weights * class_weights.to(loss)[flat_targets.where(counted, 0)]
        divisor = weights.sum()
        # 0 / 0 has no gradient.
        mean = loss / divisor.where(divisor != 0, 1)
        return mean.where(divisor != 0, math.nan)
    return loss.reshape(targets.shape) if options.per_token else loss


def chunked_log_probabilities(
    hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> Tensor:
    """Compute the log-probability of each target, 0 where it is ignored, in chunks of tokens.

    The options are `bias`, `chunk_tokens`, `ignore_index` and `softcap`, as in
    `chunked_cross_entropy`.
    """
    return -chunked_cross_entropy(hidden, weight, targets, reduction="none", **options)


def check_chunk_size(chunk_tokens: int | None) -> None:
    """Raise an error unless the size is None or a positive whole number."""
    if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
        raise ValueError(
            "chunk_tokens must be a whole number of at least 1, or None to choose one, "
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


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which `F.linear` would compute here, with autocast considered."""
    dtype = autocast_now().get(hidden.device.type, hidden.dtype)
    return hidden.dtype if hidden.dtype is torch.float64 else dtype


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if targets.dtype not in TARGET_DTYPES:
        raise ValueError(
            f"targets must be class indices (torch.int64), got {targets.dtype}: convert with "
            ".long(), or use F.cross_entropy for class probabilities"
        )
    if hidden.shape != (*targets.shape, *weight.shape[1:]):
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} and must be {(*targets.shape, *weight.shape[1:])}: "
            f"targets are {tuple(targets.shape)}, weight (vocabulary, width) is "
            f"{tuple(weight.shape)}"
        )
    others = {given.dtype for given in (weight, bias) if given is not None}
    casts = hidden.device.type in autocast_now() and hidden.dtype is not torch.float64
    if not hidden.is_floating_point() or (others != {hidden.dtype} and not casts):
        raise ValueError(
            f"hidden is {hidden.dtype}, weight and bias are {', '.join(map(str, others))}: they "
            "must have the same floating-point dtype; cast one of them, or use autocast"
        )


def _check_weights(name: str, weights: Any, shape: torch.Size) -> None:
    is_word = isinstance(weights, str) and weights == PROBABILITY_WEIGHTS
    if weights is None or (is_word and name == "token_weights"):
        return
    if not isinstance(weights, Tensor) or weights.shape != shape or weights.requires_grad:
        raise ValueError(
            f"{name} must be a tensor of shape {tuple(shape)} without gradient, or for tokens "
            f"{PROBABILITY_WEIGHTS!r}; got {weights!r:.200}. For weights that are trained multiply "
            'the losses of reduction="none" by them'
        )


def _count_fitting_rows(
    sources: tuple[Any, ...], wanted: tuple[bool, ...], dtype: torch.dtype, *, is_capped: bool
) -> int:
    """Return the number of tokens whose inputs, logits and copies fit into a chunk's bytes."""
    inputs, weight, _ = sources
    itemsize = exact_dtype(inputs).itemsize
    copies = itemsize * (1 + is_capped)
    if dtype.itemsize < itemsize:
        copies += dtype.itemsize
    classes, width = weight.shape
    of_row = classes * copies + width * dtype.itemsize
    trained = list(itertools.compress(sources, wanted)) or sources
    gradients = [source.nbytes for source in trained if source is not None]
    fewest = min(FEWEST_CHUNK_TOKENS, max(1, CHUNK_BYTES // of_row))
    wanted_rows = max(CHUNK_BYTES // of_row, int(width * TOKENS_PER_WIDTH))
    return max(fewest, min(wanted_rows, sum(gradients) // 2 // of_row))


def exact_dtype(inputs: Tensor) -> torch.dtype:
    """Return the dtype of the loss and of everything between the logits and it."""
    return torch.float64 if inputs.dtype is torch.float64 else torch.float32


@dataclass(eq=False)
class _Pass:
    """One pass over all chunks: the losses of all tokens, and the gradients of their sum."""

    options: ChunkOptions
    # One row for each target.
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weights: Any
    token_weights: Tensor | None

    def __post_init__(self) -> None:
        inputs = self.inputs
        options = self.options
        exact = exact_dtype(inputs)
        self.ignored = self.targets == options.ignore_index
        # Counted tokens first: the others need no product.
        order = self.ignored.to(torch.uint8).argsort(stable=True)
        self.num_ignored = _read(self.ignored)
        self.order = order[: len(order) - (self.num_ignored or 0)]
        self.targets = self.targets.masked_fill(self.ignored, 0)

        self.losses = inputs.new_zeros(len(self.targets), dtype=exact)
        ones = self.losses.new_ones(()).expand(len(self.weight))
        self.class_weights = ones if self.class_weights is None else self.class_weights.to(ones)
        self.gradients: list[Tensor | None] = []
        sources: Any = inputs, self.weight, self.bias
        for source, wanted in zip(sources, options.wanted, strict=True):
            dtype = inputs.dtype if source is inputs else exact
            zeros = source.new_zeros(source.shape, dtype=dtype) if wanted else None
            self.gradients.append(zeros)
        self.weight = self.weight.to(options.dtype)
        self.bias = None if self.bias is None else self.bias.to(options.dtype)

    def chunk(self, index: Tensor) -> None:
        """Compute the losses of the tokens with these indices, and add their gradients."""
        rows = self.inputs.index_select(0, index).to(self.options.dtype)
        logits = F.linear(rows, self.weight, self.bias).to(self.losses.dtype)
        self.losses.index_copy_(0, index, self._compute_losses(logits, index))
        if not any(self.options.wanted):
            return

        # The gradients of weight and bias are accumulated in float32 or float64, with the two
        # products of a plain backward. `_compute_losses` has replaced the logits by their gradient.
        if self.num_ignored is None:
            logits.masked_fill_(self.ignored[index, None], 0)
        inputs_gradient, weight_gradient, bias_gradient = self.gradients
        if bias_gradient is not None:
            bias_gradient += logits.sum(0)
        logits = logits.to(rows.dtype)
        if weight_gradient is not None and weight_gradient.dtype == rows.dtype:
            torch.addmm(weight_gradient, logits.t(), rows, out=weight_gradient)
        elif weight_gradient is not None:
            weight_gradient += logits.t() @ rows
        if inputs_gradient is not None:
            # The rows are needed no longer.
            torch.mm(logits, self.weight, out=rows)
            inputs_gradient.index_copy_(0, index, rows.to(inputs_gradient.dtype))

    def _compute_losses(self, logits: Tensor, index: Tensor) -> Tensor:
        """Return the losses of a chunk; if gradients are wanted, overwrite the logits."""
        options = self.options
        slope = None
        if options.softcap is not None:
            logits.div_(options.softcap).tanh_()
            slope = logits.square().neg_().add_(1) if any(options.wanted) else None
            logits *= options.softcap
        place = self.targets[index, None]
        # The weight of the target's loss, and the sum of all weights.
        of_class = (1 - options.label_smoothing) * self.class_weights[place]
        share = of_class

        highest = logits.amax(-1, keepdim=True)
        logits -= highest
        at_target = logits.gather(1, place)
        loss = -of_class * at_target
        if options.label_smoothing:
            # The weight of each class in every token's loss.
            of_all = self.class_weights * (options.label_smoothing / logits.shape[1])
            share = share + of_all.sum()
            loss -= (logits @ of_all)[:, None]
        norm = logits.exp_().sum(-1, keepdim=True)
        log_norm = norm.log()
        loss += share * log_norm
        if options.z_loss:
            log_sum = log_norm + highest
            loss += options.z_loss * log_sum.square()
            share = share + 2 * options.z_loss * log_sum

        scale = torch.ones_like(norm)
        if options.weighted_by_probability:
            scale = (at_target - log_norm).exp()
        if self.token_weights is not None:
            # Backward of losses per token has both.
            scale = scale * self.token_weights[index, None].to(scale)
        if any(options.wanted):
            logits *= scale * share / norm
            logits.scatter_(1, place, logits.gather(1, place) - of_class * scale)
            if options.label_smoothing:
                logits.addcmul_(scale, of_all, value=-1)
            if slope is not None:
                logits *= slope
        return (loss * scale)[:, 0]


def _read(ignored: Tensor) -> int | None:
    """Return the number of ignored tokens, or None where values can't be read."""
    if type(ignored) is not Tensor or ignored.is_meta:
        return None
    if ignored.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return int(ignored.sum())


def _run(options: ChunkOptions, *tensors: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return the losses of all tokens, and the gradients of their sum."""
    with torch.no_grad(), autocast_as({}):
        chunks = _Pass(options, *tensors)
        for index in chunks.order.split(options.chunk_tokens):
            chunks.chunk(index)
        return chunks.losses.masked_fill_(chunks.ignored, 0), chunks.gradients


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, options = arguments
        ctx.dtypes = [None if source is None else source.dtype for source in tensors[:3]]
        # As many elements as a chunk's logits have.
        ctx.block = options.chunk_tokens * len(tensors[1])
        ctx.options = options
        if options.per_token:
            ctx.save_for_backward(*tensors)
            return _run(replace(options, wanted=(False, False, False)), *tensors)[0]
        losses, gradients = _run(options, *tensors)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative()
        in_place = not graph_is_kept()
        factor = gradient
        unscaled = ctx.saved_tensors
        if ctx.options.per_token:
            *tensors, token_weights = unscaled
            # The largest incoming gradient is the factor, so that half precision does not overflow.
            least = gradient.new_full((1,), torch.finfo(gradient.dtype).tiny)
            factor = torch.cat((gradient.abs(), least)).amax()
            weights = gradient / factor
            if token_weights is not None:
                weights = weights * token_weights.to(weights)
            _, unscaled = _run(ctx.options, *tensors, weights)
            in_place = True
        scaled = [
            None
            if source is None
            else _scale(source, factor, dtype, in_place=in_place, block=ctx.block)
            for source, dtype in zip(unscaled, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


def _scale(
    unscaled: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool, block: int
) -> Tensor:
    """Multiply a saved gradient by the factor, in the factor's dtype and in place if possible.

    A bfloat16 factor would be off by 1 part in 500 for the whole gradient, and a float16 factor may
    be infinite. Parts of at most `block` elements bound what a CPU holds in the factor's dtype.
    """
    reuse = in_place and unscaled.dtype == dtype
    result = unscaled if reuse else torch.empty_like(unscaled, dtype=dtype)
    rows = max(1, block // max(1, unscaled[:1].numel()))
    for source, target in zip(unscaled.split(rows), result.split(rows), strict=True):
        # A factor without a dimension would be cast to the dtype of the gradient.
        torch.mul(source, factor[None], out=target)
    return result
