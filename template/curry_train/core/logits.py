"""Logits that are not computed yet: the head's product, and the steps between it and a loss.

Proof: `python -m pytest tests/test_chunked_loss.py`.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .chunked_cross_entropy import TARGETS, chunked_cross_entropy
from .replay import Autocast, autocast_as, autocast_now

HALVES = (torch.bfloat16, torch.float16)


@dataclass(eq=False)
class LossUse:
    """Uses of a head's logits since its last forward in training."""

    # Losses that ran in chunks.
    num_chunked: int = 0

    # Operations that needed all of the logits.
    whole: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        phrases = []
        if self.num_chunked:
            phrases.append(f"{self.num_chunked} loss{'es' * (self.num_chunked > 1)} in chunks")
        if self.whole:
            phrases.append(f"all logits made for {', '.join(self.whole)}")
        return "; ".join(phrases) or "no loss yet"


@dataclass(eq=False)
class Product:
    """Matrix product that gives the logits, with its arguments and autocast state."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk_tokens: int | None
    use: LossUse
    autocast: Autocast = field(default_factory=autocast_now)
    versions: list[int] = field(init=False)
    derived: list["weakref.ref[Logits]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = [tensor._version for tensor in self.inputs]

    @property
    def inputs(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]

    def compute(self, *inputs: Tensor) -> Tensor:
        self.check()
        with torch.enable_grad(), autocast_as(self.autocast):
            return F.linear(*inputs)

    def check(self) -> None:
        """Raise if an input has changed since forward, so that the logits would differ."""
        changed = [tensor._version for tensor in self.inputs] != self.versions
        if changed or not self.weight.untyped_storage().nbytes():
            raise RuntimeError(
                f"the logits of a head in chunks, weight {tuple(self.weight.shape)}, were read "
                "after its input, weight or bias had changed or was freed; compute the loss, and "
                "read logits, before that (before optimizer.step()), shard the head with the model "
                "and not by itself, or use remove_chunked_loss"
            )

    def make_whole(self, operation: str) -> None:
        """Compute the logits and everything derived from them that is still alive.

        They are computed together so that a write into one shows in the views of it.
        """
        self.use.whole.append(operation)
        for reference in self.derived:
            if (logits := reference()) is not None:
                logits.make()


@dataclass(eq=False)
class Logits:
    """Logits, or a tensor derived from them, that are computed only when they are read."""

    product: Product

    # The rows of the head's input that these logits are computed from.
    rows: Tensor
    dtype: torch.dtype

    # Classes are the last dimension, or else dimension 1 of 3.
    classes_last: bool = True

    # The logits that these are derived from, and the operation that derives them.
    parent: "Logits | None" = None
    step: Callable[[Tensor], Tensor] | None = None

    # The computed tensor; None until it is read.
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        self.product.derived.append(weakref.ref(self))

    @property
    def shape(self) -> tuple[int, ...]:
        leading, classes = self.rows.shape[:-1], self.product.weight.shape[0]
        return (*leading, classes) if self.classes_last else (leading[0], classes, leading[1])

    def read(self, operation: str) -> Tensor:
        """Return all of the logits; they are computed once."""
        if self.whole is None:
            self.product.make_whole(operation)
        return self.make()

    def make(self) -> Tensor:
        if self.whole is None:
            if self.parent is None:
                self.whole = self.follow(self.product.compute)
            else:
                self.whole = self.take(self.parent.make())
        return self.whole

    def take(self, parent: Tensor) -> Tensor:
        assert self.step is not None
        with torch.enable_grad():
            return self.step(parent)

    def follow(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Compute the product now with `compute`, and return all of the logits."""
        if self.parent is None:
            return compute(*(inputs or self.product.inputs))
        return self.take(self.parent.follow(compute, *inputs))

    def loss(self, targets: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute cross-entropy in chunks, in the dtype that `F.cross_entropy` returns."""
        product = self.product
        product.check()
        with autocast_as(product.autocast):
            loss = chunked_cross_entropy(
                self.rows,
                product.weight,
                targets,
                bias=product.bias,
                chunk_tokens=product.chunk_tokens,
                **options,
            )
        product.use.num_chunked += 1

        # Under autocast losses stay float32.
        return loss if autocast_now() else loss.to(self.dtype)


def loss_options(
    logits: Logits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[dict[str, Any], str]:
    """Translate the arguments of `F.cross_entropy` into options of the chunked one.

    The second value is the reason why the chunked one can't be used, or an empty string.
    """
    reasons = {
        "class weights": weight is not None,
        "size_average or reduce": size_average is not None or reduce is not None,
        f"reduction={reduction!r}": reduction not in ("mean", "sum"),
        "targets that are no indices": not isinstance(target, Tensor)
        or target.dtype not in TARGETS,
        "classes that are not in dimension 1": logits.classes_last and len(logits.shape) != 2,
    }
    if not any(reasons.values()):
        reasons["targets of another shape"] = target.shape != logits.rows.shape[:-1]
    options = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    return options, next((reason for reason, holds in reasons.items() if holds), "")


# Steps that need no logits. Each takes the arguments of the operation that it replaces, and returns
# None if it does not support them.


def regroup(function: Any, logits: Logits, *sizes: Any, **named: Any) -> Logits | None:
    """Apply view, reshape or flatten to the leading dimensions."""
    views_dtype = any(isinstance(size, torch.dtype) for size in (*sizes, *named.values()))
    if views_dtype or not logits.classes_last:
        return None
    shape = function(torch.empty((), device="meta").expand(logits.shape), *sizes, **named).shape
    if shape[-1:] != logits.shape[-1:]:
        return None
    rows = logits.rows.reshape(*shape[:-1], logits.rows.shape[-1])
    return Logits(logits.product, rows, logits.dtype)


def index(function: Any, logits: Logits, where: Any) -> Logits | None:
    """Index the leading dimensions by slices and numbers, by one tensor of indices, or a mask."""
    if not logits.classes_last:
        return None
    rank = len(logits.shape)
    entries = where if isinstance(where, tuple) else (where,)
    if len(entries) == 1 and isinstance(entries[0], Tensor):
        return _index_by_tensor(logits, entries[0])

    supported = all(
        isinstance(entry, slice | int | type(...)) and not isinstance(entry, bool)
        for entry in entries
    )
    if not supported or entries.count(...) > 1 or len(entries) - entries.count(...) > rank:
        return None
    if ... in entries:
        position = entries.index(...)
        num_missing = rank - len(entries) + 1
        entries = (*entries[:position], *[slice(None)] * num_missing, *entries[position + 1 :])
    if len(entries) == rank and entries[-1] != slice(None):
        return None
    return Logits(logits.product, logits.rows[entries], logits.dtype)


def _index_by_tensor(logits: Logits, indices: Tensor) -> Logits | None:
    is_mask = indices.dtype is torch.bool
    if not is_mask and indices.dtype is not torch.int64:
        return None
    num_indexed = indices.dim() if is_mask else 1
    if num_indexed >= len(logits.shape):
        return None
    return Logits(logits.product, logits.rows[indices], logits.dtype)


def cast(function: Any, logits: Logits, *to: Any, **named: Any) -> Logits | None:
    """Apply `float` or `to`: an upcast of half precision, or the current dtype or device."""
    if named or len(to) > 1:
        return None
    wanted = to[0] if to else torch.float32
    if isinstance(wanted, str | torch.device):
        return logits if torch.device(wanted) == logits.rows.device else None
    if wanted is logits.dtype:
        return logits
    if wanted is not torch.float32 or logits.dtype not in HALVES:
        return None
    return Logits(logits.product, logits.rows, torch.float32, logits.classes_last)


def copy_together(function: Any, logits: Logits) -> Logits | None:
    """Apply `contiguous`."""
    return Logits(logits.product, logits.rows, logits.dtype, logits.classes_last)


def move_classes(function: Any, logits: Logits, *dims: Any) -> Logits | None:
    """Apply transpose or permute: move classes from the last of 3 dimensions to dim 1, or back."""
    if len(logits.shape) != 3:
        return None
    given = dims[0] if len(dims) == 1 else dims
    if len(given) not in (2, 3) or not all(isinstance(dim, int) and -3 <= dim < 3 for dim in given):
        return None

    axes = [dim % 3 for dim in given]
    order = [0, 1, 2]
    if len(axes) == 3:
        order = axes
    else:
        order[axes[0]] = axes[1]
        order[axes[1]] = axes[0]
    if order != [0, 2, 1]:
        return None
    return Logits(logits.product, logits.rows, logits.dtype, not logits.classes_last)
