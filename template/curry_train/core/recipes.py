"""How a tensor that autograd wants to keep is computed again from what autograd keeps anyway.

`silu(gate) * up` is the product of two tensors that its own node has saved, so whoever needs it in backward can have it
made again from there; the same holds for a normalization of its input. `Keeper` is the pair of saved-tensor hooks that
does this; names of autograd's nodes and of what they save are in this file alone. Proof:
`python -m pytest tests/test_recipes.py`.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from .replay import AGAIN, REPLAY, autocast_as, check_unchanged

# Elementwise operations by the name of their node, as a function of that node. What a node did not save is None.
RECIPES: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
    "MishBackward0": lambda node: F.mish(node._saved_self),
    "HardswishBackward0": lambda node: F.hardswish(node._saved_self),
    "LeakyReluBackward0": lambda node: F.leaky_relu(node._saved_self, node._saved_negative_slope),
    "SoftplusBackward0": lambda node: F.softplus(
        node._saved_self, node._saved_beta, node._saved_threshold
    ),
    "GluBackward0": lambda node: F.glu(node._saved_self, _signed(node._saved_dim)),
    "PowBackward0": lambda node: torch.pow(node._saved_self, node._saved_exponent),
}


def _signed(dimension: int) -> int:
    """Torch hands a negative dimension out as an unsigned number."""
    return dimension - 2**64 if dimension >= 2**63 else dimension


NEEDS_BOTH = {"MulBackward0"}
CAST = "ToCopyBackward0"
DEPTH = "curry_train_depth"
DEEPEST = 4  # recipes upon recipes, so that a long chain of products is not computed again for each of its links


class Kept:
    """A tensor that stays. Hooks switch autograd's own check for changes in place off, so it is done here."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = (
            tensor.detach(),
            tensor._version,
        )  # detached: it may be its own node's output

    def value(self) -> Tensor:
        check_unchanged(self.tensor, self.version)
        return self.tensor


class Made:
    """A tensor that is made again by `make`, as a view of what that returns."""

    __slots__ = ("make", "shape", "strides", "view")

    def __init__(self, tensor: Tensor, base: Tensor, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.shape, self.strides = base.shape, base.stride()
        self.view = (
            None if base is tensor else (tensor.shape, tensor.stride(), tensor.storage_offset())
        )

    def value(self) -> Tensor:
        with torch.no_grad(), autocast_as([]):
            made = self.make()
        if made.shape != self.shape or made.stride() != self.strides:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} and strides {self.strides} came back as {tuple(made.shape)}, "
                f"{made.stride()}: its block computes something else the second time; take it out of the regions"
            )
        return made if self.view is None else made.as_strided(*self.view)


class Keeper:
    """Hooks for what is saved while a block runs: a recipe where there is one, the tensor where there is none."""

    def __init__(self, note: Callable[[Tensor, Tensor], None] | None = None) -> None:
        self.note = note

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, _unpack)

    def pack(self, tensor: Tensor) -> Kept | Made:
        base = tensor if tensor._base is None else tensor._base
        # A version above 0: changed in place since its node made it, so that the node would make another value.
        if base.grad_fn is not None and base._version == 0 and base.dtype == tensor.dtype:
            made = _recipe(tensor, base)
            if made is not None:
                return made
        if self.note is not None:
            self.note(tensor, base)
        return Kept(tensor)


EXPENSIVE_NODES = (
    "Mm",
    "Addmm",
    "Bmm",
    "Baddbmm",
    "Convolution",
    "ScaledDotProduct",
    "Linear",
    "Embedding",
    "Native",
)


def can_be_made(node: Any, kept: Container[Any]) -> bool:
    """Whether the output of a node follows from outputs that are kept by cheap operations alone."""
    if node.name().startswith(EXPENSIVE_NODES):
        return False
    makers = [maker for maker, _ in node.next_functions if maker is not None]
    return (
        all(
            maker in kept or hasattr(maker, "variable") or can_be_made(maker, kept)
            for maker in makers
        )
        and makers != []
    )


def _unpack(saved: Kept | Made) -> Tensor:
    return saved.value()


def _recipe(tensor: Tensor, base: Tensor) -> Made | None:
    replay = getattr(base, REPLAY, None)
    if replay is not None:
        return Made(tensor, base, replay.use())
    node: Any = base.grad_fn
    if AGAIN in node.metadata:
        return None
    if node.name() == CAST:
        source, dtype = _source_of_cast(node), base.dtype
        return None if source is None else Made(tensor, base, lambda: source().to(dtype))
    recipe = RECIPES.get(node.name())
    makers = [maker for maker, _ in node.next_functions]
    if recipe is None or (
        node.name() in NEEDS_BOTH and None in makers
    ):  # a factor is saved for the other's gradient
        return None
    depth = 1 + max(maker.metadata.get(DEPTH, 0) for maker in makers if maker is not None)
    if depth > DEEPEST:
        return None
    node.metadata[DEPTH] = depth
    return Made(tensor, base, lambda: recipe(node))


def _source_of_cast(node: Any) -> Callable[[], Tensor] | None:
    """How the tensor that a cast read can be had in backward: it is a weight, or a replay's output."""
    maker = node.next_functions[0][0]
    if maker is None:
        return None
    weight = getattr(maker, "variable", None)
    if weight is not None:
        return Kept(weight).value
    replay = maker.metadata.get(REPLAY, lambda: None)()
    return None if replay is None else replay.use()
