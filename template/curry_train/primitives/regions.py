"""Recompute regions of a block without a dispatch mode, and keep its products.

    apply_regions(model)

The outputs of matrix products and attention stay saved. No matrix product and none of the model's
own code runs twice: a tensor that is cheap to compute is computed again in backward from the
tensors that autograd saved for it.

Proof: `python -m pytest tests/primitives/test_regions.py tests/peers/test_peer_behaviours.py`.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import get_device_states

from ..core.blocks import (
    CAST_NODE,
    CheckedTensor,
    DerivedForward,
    Globs,
    become,
    check_unchanged,
    find_blocks,
    in_transform,
    match_names,
    recomputing,
    restore,
)
from .autocast import autocast_as, autocast_now
from .rerun import RETURNED_ONCE_KEY, FlatCall, second_call_contexts

# Run one cheap module again, and recompute its output too if backward needs it.

REPLAY_KEY = "curry_train_replay"


@dataclass(eq=False)
class Replay:
    """One call of a module that saves only its input.

    When backward needs a tensor that the call saved, or its output, a second call recomputes all of
    them. The object is kept alive by the tensors that autograd saved from the call and by the users
    of its output, which release it in backward. Nodes must not hold it, because they live as long
    as the loss.
    """

    call: FlatCall

    # Tensors that the first call saved, and uses of its output.
    num_saved: int = 0
    num_uses: int = 0
    # Results of the second call that backward has not taken: the saved tensors by their index, and
    # the output by a negative one for each use.
    results: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = self.call.take_tensors()
        self.versions = [tensor._version for tensor in self.inputs]
        self.autocast = autocast_now()

    def first(self) -> Any:
        """Make the first call, and mark its output so that it can be recomputed."""
        with saved_tensors_hooks(self._pack, self._take):
            output = self.call()
        fresh = isinstance(output, Tensor) and output.grad_fn is not None and output._base is None
        if fresh and not any(output is tensor for tensor in self.inputs):
            setattr(output, REPLAY_KEY, self)
            # Recipes for casts of the output look it up here.
            output.grad_fn.metadata[REPLAY_KEY] = weakref.ref(self)
        return output

    def use(self) -> Callable[[], Tensor]:
        """Return a function that gives the output in backward; the last use releases the output."""
        self.num_uses += 1
        return functools.partial(self._take, -self.num_uses)

    def _pack(self, _: Tensor) -> int:
        self.num_saved += 1
        return self.num_saved - 1

    def _take(self, index: int) -> Tensor:
        if index not in self.results:
            self._compute_again()
        return self.results.pop(index)

    def _compute_again(self) -> None:
        for tensor, version in zip(self.inputs, self.versions, strict=True):
            check_unchanged(tensor, version)
        saved: list[Tensor] = []
        with (
            torch.enable_grad(),
            autocast_as(self.autocast),
            # No backward runs through this call.
            saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), saved.pop),
        ):
            output = self.call(*self.inputs)
        if len(saved) != self.num_saved:
            raise RuntimeError(
                f"a module saved {self.num_saved} tensors the first time and {len(saved)} the "
                "second: it computes something else when it is recomputed; take it out of the "
                "regions"
            )
        self.results = dict(enumerate(saved))
        if self.num_uses:
            self.results |= dict.fromkeys(range(-self.num_uses, 0), output.detach())


# Recompute a saved tensor from other tensors that autograd saves anyway.

# For elementwise operations: the name of the node, and a function that computes the output from the
# node. Tensors that a node did not save are None.
NODE_RECIPES: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
    "MishBackward0": lambda node: F.mish(node._saved_self),
    "HardswishBackward0": lambda node: F.hardswish(node._saved_self),
    "LeakyReluBackward0": lambda node: F.leaky_relu(node._saved_self, node._saved_negative_slope),
    "SoftplusBackward0": lambda node: F.softplus(
        node._saved_self, node._saved_beta, node._saved_threshold
    ),
    # Torch returns a negative dimension as an unsigned number.
    "GluBackward0": lambda node: F.glu(node._saved_self, (node._saved_dim ^ 2**63) - 2**63),
    "PowBackward0": lambda node: torch.pow(node._saved_self, node._saved_exponent),
}


DEPTH_KEY = "curry_train_depth"

# Recipes that may depend on each other in a row. Without a limit, a long chain of products would be
# computed again for each of its members.
DEEPEST_RECIPE = 4


class RecomputedTensor:
    """A tensor that `make` computes again in backward, or a view of that result."""

    def __init__(self, tensor: Tensor, base: Tensor, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.shape = base.shape
        self.strides = base.stride()
        self.view = tensor.shape, tensor.stride(), tensor.storage_offset()

    def value(self) -> Tensor:
        with torch.no_grad(), autocast_as({}):
            made = self.make()
        if made.shape != self.shape or made.stride() != self.strides:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} and strides {self.strides} was recomputed "
                f"as {tuple(made.shape)}, {made.stride()}: its block computes something else the "
                "second time; take it out of the regions"
            )
        return made.as_strided(*self.view)


def pack(tensor: Tensor) -> CheckedTensor | RecomputedTensor:
    """Return a recipe for a tensor that autograd saves if there is one, else the tensor."""
    base = tensor if tensor._base is None else tensor._base

    # If the version is above 0, the tensor was changed in place after its node made it, and the
    # node would compute another value. Nested tensors have no strides to make a view by, and no
    # strides express a conjugate.
    is_plain = base._version == 0 and base.dtype == tensor.dtype and not base.is_nested
    is_plain &= tensor.is_conj() == base.is_conj()
    if base.grad_fn is not None and is_plain:
        make = _make_recipe(base)
        if make is not None:
            return RecomputedTensor(tensor, base, make)
    return CheckedTensor(tensor)


def _make_recipe(base: Tensor) -> Callable[[], Tensor] | None:
    """Return a function that computes a tensor again in backward, or None."""
    replay: Replay | None = getattr(base, REPLAY_KEY, None)
    if replay is not None:
        return replay.use()
    node: Any = base.grad_fn
    if RETURNED_ONCE_KEY in node.metadata:
        return None
    if node.name() == CAST_NODE:
        maker = node.next_functions[0][0]
        weight = getattr(maker, "variable", None)
        if weight is not None:
            source = CheckedTensor(weight).value
        else:
            replay = maker and maker.metadata.get(REPLAY_KEY, lambda: None)()
            if replay is None:
                return None
            source = replay.use()
        dtype = base.dtype
        return lambda: source().to(dtype)
    recipe = NODE_RECIPES.get(node.name())
    if recipe is None:
        return None

    # A factor is saved only if the other one needs a gradient.
    makers = [maker for maker, _ in node.next_functions]
    if node.name() == "MulBackward0" and None in makers:
        return None

    depth = 1 + max(maker.metadata.get(DEPTH_KEY, 0) for maker in makers if maker is not None)
    if depth > DEEPEST_RECIPE:
        return None
    node.metadata[DEPTH_KEY] = depth
    return lambda: recipe(node)


# Regions: recompute norms and elementwise operations, without a dispatch mode.

second_call_contexts.add(recomputing)


class Regions(DerivedForward):
    """A block whose cheap tensors are recomputed in backward; the compiler does so by itself."""

    def _run_changed(self, run: Any, inputs: Any) -> Any:
        args, kwargs = inputs
        with saved_tensors_hooks(pack, lambda saved: saved.value()):
            return run(*args, **kwargs)


class Replayed(DerivedForward):
    """A norm or a named module inside a `Regions` block; it runs once more in backward.

    A module that the user named has its name as the technique.
    """

    def _run_changed(self, run: Any, inputs: Any) -> Any:
        if in_transform():
            # A second call would need tensors that must not escape from the transform.
            args, kwargs = inputs
            return run(*args, **kwargs)
        name = self._technique
        before = generator_states(self) if name else []
        output = Replay(FlatCall(run, inputs, modules=[self])).first()
        if name and not all(map(torch.equal, before, generator_states(self))):
            raise ValueError(
                f"{name} draws random numbers, and would draw different ones the second time: "
                "leave it out of also"
            )
        return output


def generator_states(module: nn.Module) -> list[Tensor]:
    """Return the states of torch's generators that a module's operations may draw from."""
    tensors = module.parameters() if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *get_device_states(*tensors)[1]]


def apply_regions(model: nn.Module, *, blocks: Globs | None = None, also: Globs = ()) -> list[str]:
    """Recompute the cheap tensors of a model's blocks, in place, and return the blocks' names.

    The outputs of matrix products and attention stay saved, and so does any tensor that can't be
    recomputed. Norms inside the blocks run once more in backward, and so do the modules that the
    globs in `also` match, such as an activation of your own. Those must be cheap, draw no random
    numbers and hold no state. Call this before DDP, `fully_shard` and `torch.compile`;
    compiled code does this by itself.
    """
    found = find_blocks(model, blocks)
    inside = {
        f"{name}.{path}": module
        for name, block in found.items()
        for path, module in block.named_modules()
        if path
    }
    named = set(match_names([*inside], also, option="also"))

    for block in found.values():
        become(Regions, block)
    for name, module in inside.items():
        # A shared module has several names and is changed at the first.
        if (name in named or _is_norm(module)) and not isinstance(module, Replayed):
            become(Replayed, module, name if name in named else None)
    return list(found)


def remove_regions(model: nn.Module) -> list[str]:
    """Undo `apply_regions` and return the names of the blocks that were changed."""
    restore(model, Replayed)
    return restore(model, Regions)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm without running statistics.

    Norms of torch are recognised by class, others (those of Hugging Face models) by name.
    """
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        return True
    holds_more = [*module.children(), *module.buffers()]
    has_norm_name = type(module).__name__.endswith("Norm")
    has_vectors_only = all(weight.dim() <= 1 for weight in module.parameters())
    return has_norm_name and has_vectors_only and not holds_more
