"""Recompute a saved tensor from other tensors that autograd saves anyway.

`silu(gate) * up` is the product of two tensors that its own autograd node saves, so backward can
compute it again from these; in the same way, a normalization is computed again from its input.
`Keeper` holds the pair of saved-tensor hooks that does this. The names of autograd's nodes and of
their saved attributes are used in this module only.

Proof: `python -m pytest tests/test_recipes.py`.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from .replay import AGAIN, REPLAY, autocast_as, check_unchanged

# For elementwise operations: the name of the node, and a function that computes the output from the
# node. Tensors that a node did not save are None.
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
    """Convert a dimension back to a signed number; torch returns negative ones as unsigned."""
    return dimension - 2**64 if dimension >= 2**63 else dimension


NEEDS_BOTH = {"MulBackward0"}
CAST = "ToCopyBackward0"
DEPTH = "curry_train_depth"

# Recipes that may depend on each other in a row. Without a limit, a long chain of products would be
# computed again for each of its members.
DEEPEST = 4


class Kept:
    """A tensor that is saved as it is, and checked for changes in place.

    Saved-tensor hooks switch off autograd's own check.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached, because the tensor may be the output of the node that saves it.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def value(self) -> Tensor:
        check_unchanged(self.tensor, self.version)
        return self.tensor


class Made:
    """A tensor that `make` computes again in backward, or a view of that result."""

    __slots__ = ("make", "shape", "strides", "view")

    def __init__(self, tensor: Tensor, base: Tensor, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.shape = base.shape
        self.strides = base.stride()
        self.view = None
        if base is not tensor:
            self.view = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def value(self) -> Tensor:
        with torch.no_grad(), autocast_as([]):
            made = self.make()
        if made.shape != self.shape or made.stride() != self.strides:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} and strides {self.strides} was recomputed "
                f"as {tuple(made.shape)}, {made.stride()}: its block computes something else the "
                "second time; take it out of the regions"
            )
        return made if self.view is None else made.as_strided(*self.view)


class Keeper:
    """Saved-tensor hooks of a block that save a recipe if there is one, else the tensor."""

    def __init__(self, note: Callable[[Tensor, Tensor], None] | None = None) -> None:
        self.note = note

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, _unpack)

    def pack(self, tensor: Tensor) -> Kept | Made:
        base = tensor if tensor._base is None else tensor._base

        # If the version is above 0, the tensor was changed in place after its node made it, and the
        # node would compute another value.
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
    """Return whether cheap operations alone can compute a node's output from saved outputs."""
    if node.name().startswith(EXPENSIVE_NODES):
        return False
    makers = [maker for maker, _ in node.next_functions if maker is not None]
    if not makers:
        return False
    return all(
        maker in kept or hasattr(maker, "variable") or can_be_made(maker, kept) for maker in makers
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
        source = _source_of_cast(node)
        dtype = base.dtype
        return None if source is None else Made(tensor, base, lambda: source().to(dtype))
    recipe = RECIPES.get(node.name())
    if recipe is None:
        return None

    # A factor is saved only if the other one needs a gradient.
    makers = [maker for maker, _ in node.next_functions]
    if node.name() in NEEDS_BOTH and None in makers:
        return None

    depth = 1 + max(maker.metadata.get(DEPTH, 0) for maker in makers if maker is not None)
    if depth > DEEPEST:
        return None
    node.metadata[DEPTH] = depth
    return Made(tensor, base, lambda: recipe(node))


def _source_of_cast(node: Any) -> Callable[[], Tensor] | None:
    """Return a function that gives a cast's input in backward, or None.

    There is one if the input is a weight or the output of a replay.
    """
    maker = node.next_functions[0][0]
    if maker is None:
        return None
    weight = getattr(maker, "variable", None)
    if weight is not None:
        return Kept(weight).value
    replay = maker.metadata.get(REPLAY, lambda: None)()
    return None if replay is None else replay.use()
