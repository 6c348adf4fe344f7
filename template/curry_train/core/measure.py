"""What a training step costs: held and peak bytes, FLOPs, seconds; one interface on CPU and CUDA.

On CPU the bytes are exact and repeatable: every storage that an operation creates is followed until it dies. On CUDA
they are the allocator's. One instrument per pass, because instruments keep tensors alive that others would count.
Proof: `python -m pytest tests/test_measure.py`.
"""

import gc
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Memory:
    """`held_bytes`: activation storages alive after forward. `peak_bytes`: the most alive at any moment of forward and
    backward, gradients included; parameters, buffers and the batch were there before and do not count."""

    held_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products, convolutions and attention; recomputation happens in `backward`."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class StepTime:
    """Seconds of a forward and backward over several runs."""

    median: float
    fastest: float
    slowest: float


class LiveStorages(TorchDispatchMode):
    """Follows every storage made while the mode is on until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_alive = 0
        self.bytes_peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor):
                self._meet(value, was_there=True)
        out = func(*args, **kwargs)
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._meet(value, was_there=False)
        self.bytes_peak = max(self.bytes_peak, self.bytes_alive)
        return out

    def _meet(self, tensor: Tensor, *, was_there: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        size = 0 if was_there else storage.nbytes()
        self.bytes_alive += size

        def freed(reference: Any) -> None:
            self.bytes_alive -= size
            if self._known.get(key) is reference:
                del self._known[key]

        self._known[key] = weakref.ref(storage, freed)


class FlopCount(TorchDispatchMode):
    """Adds up the FLOPs of every operation that torch has a formula for, and of attention on CPU, which it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet in _CPU_ATTENTION:
            self.flops += _CPU_ATTENTION[packet](args)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


_CPU_ATTENTION: dict[Any, Callable[[Any], int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda args: sdpa_flop_count(
        *[tensor.shape for tensor in args[:3]]
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args: sdpa_backward_flop_count(
        *[tensor.shape for tensor in args[:4]]
    ),
}


def measure_memory(module: nn.Module, batch: Any, loss: Loss) -> Memory:
    """Held and peak bytes of one forward and backward. Gradients are dropped before and after."""
    device = _device(module)
    if device.type == "cuda":
        loss(module, batch).backward()  # allocates the libraries' workspaces, which stay
    _drop_gradients(module)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        value = loss(module, batch)
        held = torch.cuda.memory_allocated(device) - before
        value.backward()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with LiveStorages() as storages:
            value = loss(module, batch)
            held = storages.bytes_alive
            value.backward()
            peak = storages.bytes_peak
    del value
    _drop_gradients(module)
    return Memory(held, peak)


def count_flops(module: nn.Module, batch: Any, loss: Loss) -> Flops:
    """FLOPs of one forward and of its backward, in that order."""
    with FlopCount() as forward:
        value = loss(module, batch)
    with FlopCount() as backward:
        value.backward()
    _drop_gradients(module)
    return Flops(forward.flops, backward.flops)


def recompute_flops(plain: Flops, technique: Flops) -> int:
    """FLOPs that the technique does again in backward."""
    return technique.backward - plain.backward


def time_step(module: nn.Module, batch: Any, loss: Loss, *, repeats: int = 5, warmup: int = 1) -> StepTime:
    """Wall time of a forward and backward; the device is waited for."""
    device, seconds = _device(module), []
    for _ in range(warmup + repeats):
        _drop_gradients(module)
        _wait(device)
        start = time.perf_counter()
        loss(module, batch).backward()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    _drop_gradients(module)
    seconds = seconds[warmup:]
    return StepTime(statistics.median(seconds), min(seconds), max(seconds))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _drop_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None
    gc.collect()
