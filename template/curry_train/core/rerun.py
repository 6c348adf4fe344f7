"""State that a second forward must find as the first one left it: modes, autocast, statistics.

Proof: `python -m pytest tests/core tests/primitives`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves

# The number of open `plain_blocks`, and of recomputed calls that run now, of all threads.
num_plain: list[int] = [0]
num_recomputed: list[int] = [0]


@contextlib.contextmanager
def plain_blocks() -> Iterator[None]:
    """Run changed blocks as the original ones in forwards inside the context."""
    num_plain[0] += 1
    try:
        yield
    finally:
        num_plain[0] -= 1


def is_active(module: nn.Module | None = None) -> bool:
    """Return whether a changed block works now: in training, with grad mode."""
    if num_plain[0] and not num_recomputed[0]:
        return False
    return (module is None or module.training) and torch.is_grad_enabled()


# Disables function modes: even where a mode maps CUDA to the CPU, CUDA's generators are CUDA's.
unwatched = torch._C.DisableTorchFunction

# Set on autograd nodes whose saved tensors a checkpointed call returns only once.
RETURNED_ONCE_KEY = "curry_train_again"
# Name of the autograd node of a cast.
CAST_NODE = "ToCopyBackward0"


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raise if a saved tensor was changed in place, as autograd does for tensors without hooks."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an "
            f"inplace operation: it is at version {tensor._version}, and {version} was saved; "
            "write the result to another tensor"
        )


class CheckedTensor:
    """A tensor that is saved as it is, and checked for changes in place.

    Saved-tensor hooks switch off autograd's own check.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached where it may be the output of the node that saves it; else the object itself.
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.version = tensor._version

    def value(self) -> Tensor:
        check_unchanged(self.tensor, self.version)
        return self.tensor


Autocast = list[tuple[str, torch.dtype]]


def autocast_now() -> Autocast:
    """Return the device types for which autocast is on, with their dtypes."""
    return [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
        if torch.is_autocast_enabled(kind)
    ]


@contextlib.contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Set autocast to a recorded state inside the context."""
    now = dict(autocast_now())
    wanted = dict(state)
    with contextlib.ExitStack() as stack:
        for kind in now | wanted:
            if now.get(kind) != wanted.get(kind):
                stack.enter_context(torch.autocast(kind, wanted.get(kind), kind in wanted))
        yield


def function_modes() -> list[TorchFunctionMode]:
    """Return the active function modes, such as `with torch.device(...)`."""
    return list(_get_current_function_mode_stack())


@contextlib.contextmanager
def function_modes_as(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """Enter recorded function modes that are not active now.

    Torch runs backward without the modes in which `backward` is called. For a default device a new
    context is entered, because a context can restore only one previous state.
    """
    now = function_modes()
    with contextlib.ExitStack() as stack:
        for mode in modes:
            if not any(mode is other for other in now):
                stack.enter_context(mode.device if isinstance(mode, DeviceContext) else mode)
        yield


def run_backward(value: Tensor, gradient: Tensor | None = None) -> None:
    """Run backward with the function modes that are active, in a user's own recomputation too.

    Called with a tensor, torch hands backward to the modes and runs it without them. An edge of the
    graph is no tensor.
    """
    torch.autograd.backward(get_gradient_edge(value), gradient)


def is_batch_norm(module: nn.Module) -> TypeGuard[_NormBase]:
    """Return whether a module is a norm that may keep running statistics."""
    return isinstance(module, _NormBase)


@contextlib.contextmanager
def statistics_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep BatchNorm's running statistics unchanged during a recomputed forward.

    This sets momentum to 0 and leaves `track_running_stats` on, because autograd has to save as
    many tensors as in the first forward.
    """
    layers = {id(layer): layer for module in modules for layer in module.modules()}.values()
    norms = [layer for layer in layers if is_batch_norm(layer) and layer.track_running_stats]
    before = [(layer.momentum, layer._buffers.get("num_batches_tracked")) for layer in norms]
    try:
        for layer, (_, batches) in zip(norms, before, strict=True):
            layer.momentum = 0.0
            layer._buffers["num_batches_tracked"] = None if batches is None else batches.clone()
        yield
    finally:
        for layer, (momentum, batches) in zip(norms, before, strict=True):
            layer.momentum = momentum
            layer._buffers["num_batches_tracked"] = batches


def mark_returned_once(output: Any) -> None:
    """Mark the nodes of a checkpointed call's output: their saved tensors come back only once."""
    for leaf in tree_leaves(output):
        for tensor in (leaf, leaf._base) if isinstance(leaf, Tensor) else ():
            if tensor is not None and tensor.grad_fn is not None:
                node: Any = tensor.grad_fn
                node.metadata[RETURNED_ONCE_KEY] = True
