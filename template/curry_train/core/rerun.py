"""Save and restore what a second run must find: generators, buffers, modes, tensors.

Proof: `python -m pytest tests/core tests/primitives`.
"""

import contextlib
import importlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states

# Run a module and restore its buffers, its gradients and every random generator afterwards.

# Disables function modes: even where a mode maps CUDA to the CPU, CUDA's generators are CUDA's.
unwatched = torch._C.DisableTorchFunction


def generator_states(devices: Iterable[int] | None = None) -> dict[str, Any]:
    """Return the states of torch, Python, NumPy if it is loaded, and CUDA, by default all of it."""
    if devices is None:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"python": random.getstate()}
    if numpy is not None:
        states["numpy"] = numpy.random.get_state(legacy=False)
    with unwatched():
        states["torch"] = torch.get_rng_state()
        for device in devices:
            states[f"cuda-{device}"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Set generators to states that `generator_states` returned."""
    setters: dict[str, Any] = {"python": random.setstate, "torch": torch.set_rng_state}
    if "numpy" in states:
        setters["numpy"] = importlib.import_module("numpy").random.set_state
    with unwatched():
        for name, state in states.items():
            if name in setters:
                setters[name](state)
            else:
                torch.cuda.set_rng_state(state, int(name.removeprefix("cuda-")))


def same_state(one: Any, other: Any) -> bool:
    """Compare two states of generators: tensors, arrays and numbers in dicts and tuples."""
    parts = tree_leaves(one)
    others = tree_leaves(other)
    return len(parts) == len(others) and all(map(_same_part, parts, others))


def _same_part(one: Any, other: Any) -> bool:
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)


class Generators:
    """A snapshot of the generators; the tensors among `values` give the devices to include."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        tensors = [value for value in values if isinstance(value, Tensor)]
        self._values = {value.device: value for value in tensors if value.device.type != "cpu"}
        others = [value for device, value in self._values.items() if device.type != "cuda"]
        self._other_devices, self._other_states = get_device_states(*others)
        self._states = generator_states(one.index for one in self._values if one.type == "cuda")

    def moved(self) -> bool:
        """Return whether a generator was used since the snapshot."""
        return not self.are_as(Generators(self._values.values()))

    def are_as(self, other: "Generators") -> bool:
        """Return whether two snapshots hold the same states."""
        own = self._states, self._other_devices, self._other_states
        return same_state(own, (other._states, other._other_devices, other._other_states))

    def restore(self) -> None:
        """Set the generators to these states."""
        set_generator_states(self._states)
        if self._other_devices:
            (kind,) = {device.type for device in self._values} - {"cpu", "cuda", "meta"}
            set_device_states(self._other_devices, self._other_states, device_type=kind)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of torch, CUDA, Python and, if it is loaded, NumPy on exit."""
    before = generator_states()
    try:
        yield
    finally:
        set_generator_states(before)


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python and, if it is loaded, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator inside the context, and restore them on exit."""
    with generators_kept():
        seed_generators(seed)
        yield


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore every buffer on exit: its value, and the tensor itself if forward replaced it."""
    owners = [(owner, name) for owner in module.modules() for name in owner._buffers]
    before = [(owner, name, owner._buffers[name]) for owner, name in owners]
    values = [None if buffer is None else buffer.detach().clone() for _, _, buffer in before]
    try:
        yield
    finally:
        with torch.no_grad():
            for (owner, name, buffer), value in zip(before, values, strict=True):
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                owner._buffers[name] = buffer


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Start without gradients; on exit restore buffers and generators and drop the gradients."""
    module.zero_grad(set_to_none=True)
    try:
        with generators_kept(), buffers_kept(module):
            yield
    finally:
        module.zero_grad(set_to_none=True)


# State that a second forward must find as the first one left it: modes, autocast, statistics.

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
