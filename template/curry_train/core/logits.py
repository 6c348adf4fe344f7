"""The logits of a head before anybody has made them: the product that they are, and what lies between it and a loss.

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
    """What became of a head's logits since its last forward in training: losses that ran in chunks, and the operations
    that asked for all of the logits."""

    num_chunked: int = 0
    whole: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        chunked = (
            f"{self.num_chunked} loss{'es' * (self.num_chunked > 1)} in chunks"
            if self.num_chunked
            else ""
        )
        asked = f"all logits made for {', '.join(self.whole)}" if self.whole else ""
        return "; ".join(part for part in (chunked, asked) if part) or "no loss yet"


@dataclass(eq=False)
class Product:
    """The product that gives the logits, as it was asked for."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk_tokens: int | None
    use: LossUse
    autocast: Autocast = field(default_factory=autocast_now)
    versions: list[int] = field(init=False)
    derived: list["weakref.ref[Logits]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = [given._version for given in self.inputs]

    @property
    def inputs(self) -> list[Tensor]:
        return [given for given in (self.hidden, self.weight, self.bias) if given is not None]

    def compute(self, *inputs: Tensor) -> Tensor:
        self.check()
        with torch.enable_grad(), autocast_as(self.autocast):
            return F.linear(*inputs)

    def check(self) -> None:
        """Values that are asked for late are those that would have come at once, or it is an error."""
        changed = [given._version for given in self.inputs] != self.versions
        if changed or not self.weight.untyped_storage().nbytes():
            raise RuntimeError(
                f"the logits of a head in chunks, weight {tuple(self.weight.shape)}, were asked for after its input, "
                "weight or bias had changed or was freed; compute the loss, and read logits, before that (before "
                "optimizer.step()), shard the head with the model and not by itself, or use remove_chunked_loss"
            )

    def make_whole(self, operation: str) -> None:
        """Make the logits, and what was derived of them and is still there: written into, they stay in step."""
        self.use.whole.append(operation)
        for reference in self.derived:
            if (logits := reference()) is not None:
                logits.make()


@dataclass(eq=False)
class Logits:
    """Logits, or what is derived of them: the rows of the head's input that they are made of, and the step from their
    parent. Classes are the last dimension, or else dimension 1 of 3."""

    product: Product
    rows: Tensor
    dtype: torch.dtype
    classes_last: bool = True
    parent: "Logits | None" = None
    step: Callable[[Tensor], Tensor] | None = None
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        self.product.derived.append(weakref.ref(self))

    @property
    def shape(self) -> tuple[int, ...]:
        leading, classes = self.rows.shape[:-1], self.product.weight.shape[0]
        return (*leading, classes) if self.classes_last else (leading[0], classes, leading[1])

    def read(self, operation: str) -> Tensor:
        """All of the logits; they are made once."""
        if self.whole is None:
            self.product.make_whole(operation)
        return self.make()

    def make(self) -> Tensor:
        if self.whole is None:
            self.whole = (
                self.follow(self.product.compute)
                if self.parent is None
                else self.take(self.parent.make())
            )
        return self.whole

    def take(self, parent: Tensor) -> Tensor:
        assert self.step is not None
        with torch.enable_grad():
            return self.step(parent)

    def follow(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """All of the logits of a product that is computed now."""
        if self.parent is None:
            return compute(*(inputs or self.product.inputs))
        return self.take(self.parent.follow(compute, *inputs))

    def loss(self, targets: Tensor, options: dict[str, Any]) -> Tensor:
        """Cross-entropy in chunks, in the dtype that `F.cross_entropy` gives."""
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
        return loss if autocast_now() else loss.to(self.dtype)  # autocast makes losses float32


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
    """Takes what `F.cross_entropy` takes; returns what the chunked one is to be given, or why it can't be used."""
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


# Steps that can be taken without the logits. Each takes what the operation does, and returns None where it can't.


def regroup(function: Any, logits: Logits, *sizes: Any, **named: Any) -> Logits | None:
    """Of view, reshape and flatten: the leading dimensions become others."""
    if not logits.classes_last or any(
        isinstance(size, torch.dtype) for size in (*sizes, *named.values())
    ):
        return None
    shape = function(torch.empty((), device="meta").expand(logits.shape), *sizes, **named).shape
    if shape[-1:] != logits.shape[-1:]:
        return None
    return Logits(
        logits.product, logits.rows.reshape(*shape[:-1], logits.rows.shape[-1]), logits.dtype
    )


def index(function: Any, logits: Logits, where: Any) -> Logits | None:
    """Slices, numbers or one tensor of indices or a mask, of the leading dimensions."""
    rank, entries = len(logits.shape), where if isinstance(where, tuple) else (where,)
    if not logits.classes_last:
        return None
    if len(entries) == 1 and isinstance(entries[0], Tensor):
        mask = entries[0].dtype is torch.bool
        if (entries[0].dim() if mask else 1) >= rank or (
            not mask and entries[0].dtype is not torch.int64
        ):
            return None
        return Logits(logits.product, logits.rows[entries[0]], logits.dtype)
    if any(
        isinstance(entry, bool) or not isinstance(entry, slice | int | type(...))
        for entry in entries
    ):
        return None
    if entries.count(...) > 1 or len(entries) - entries.count(...) > rank:
        return None
    if ... in entries:
        place = entries.index(...)
        missing = rank - len(entries) + 1
        entries = (*entries[:place], *[slice(None)] * missing, *entries[place + 1 :])
    if len(entries) == rank and entries[-1] != slice(None):
        return None
    return Logits(logits.product, logits.rows[entries], logits.dtype)


def cast(function: Any, logits: Logits, *to: Any, **named: Any) -> Logits | None:
    """Of float and to: an upcast of half precision, or the dtype and the device that they have."""
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
    """Of contiguous."""
    return Logits(logits.product, logits.rows, logits.dtype, logits.classes_last)


def move_classes(function: Any, logits: Logits, *dims: Any) -> Logits | None:
    """Of transpose and permute: classes from the last of three dimensions to dimension 1, and back."""
    if len(logits.shape) != 3:
        return None
    order = [0, 1, 2]
    given = dims[0] if len(dims) == 1 else dims
    if len(given) not in (2, 3) or not all(isinstance(dim, int) and -3 <= dim < 3 for dim in given):
        return None
    given = [dim % 3 for dim in given]
    if len(given) == 3:
        order = given
    else:
        order[given[0]], order[given[1]] = given[1], given[0]
    if order != [0, 2, 1]:
        return None
    return Logits(logits.product, logits.rows, logits.dtype, not logits.classes_last)
