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

from .flops import operation_flops
from .untouched import seeded, untouched

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


@dataclass(eq=False)
class Life:
    """One storage: its bytes, in whose name it was made, and by number the operation that made it and the first one
    that no longer found it."""

    nbytes: int
    owner: Any
    born: int
    died: int | None = None
    used_elsewhere: bool = False  # than in its owner


class LiveStorages(TorchDispatchMode):
    """Follows every storage made while the mode is on until it is freed.

    `owner` is asked in whose name a storage is made; with `device` only storages of that kind of device count.
    """

    def __init__(
        self, *, owner: Callable[[], Any] = lambda: None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.bytes_alive = 0
        self.bytes_peak = 0
        self.num_operations = 0
        self.lives: list[Life] = []
        self._owner = owner
        self._device = device
        self._known: dict[int, tuple[weakref.ref[Any], Life | None]] = {}

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
        self.num_operations += 1
        return out

    def follow(self, tensor: Tensor, *, owner: Any) -> None:
        """Count a tensor that was there before; a storage that is known stays its first owner's."""
        self._meet(tensor, was_there=False, owner=owner)

    def lives_of(self, tensor: Tensor) -> list[Life]:
        """What was recorded of the storages of a tensor; nothing where they were there before."""
        known = (self._known.get(storage._cdata) for storage in _storages(tensor))
        return [
            entry[1]
            for entry in known
            if entry is not None and entry[0]() is not None and entry[1] is not None
        ]

    def _meet(self, tensor: Tensor, *, was_there: bool, owner: Any = None) -> None:
        if self._device is not None and tensor.device.type != self._device.type:
            return
        for storage in _storages(tensor):
            known = self._known.get(storage._cdata)
            if (
                was_there
                and known is not None
                and known[1] is not None
                and self._owner() != known[1].owner
            ):
                known[1].used_elsewhere = True
            if known is None or known[0]() is None:
                counts = not was_there and storage.nbytes() > 0
                self._watch(
                    storage,
                    Life(storage.nbytes(), owner or self._owner(), self.num_operations),
                    counts,
                )

    def _watch(self, storage: Any, life: Life, counts: bool) -> None:
        key = storage._cdata

        def freed(reference: Any) -> None:
            if counts:
                self.bytes_alive -= life.nbytes
                life.died = self.num_operations
            if key in self._known and self._known[key][0] is reference:
                del self._known[key]

        self._known[key] = weakref.ref(storage, freed), life if counts else None
        if counts:
            self.bytes_alive += life.nbytes
            self.lives.append(life)


def _storages(tensor: Tensor) -> list[Any]:
    """The storage of a tensor, or those of the two parts of a sparse one."""
    parts = (
        (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)
    )
    return [part.untyped_storage() for part in parts]


class FlopCount(TorchDispatchMode):
    """Adds up the FLOPs of every operation that torch has a formula for; attention is counted here, because torch
    leaves out its CPU kernel, and before 2.13 refuses grouped-query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += operation_flops(func, args, kwargs or {}, out)
        return out


def measure_memory(module: nn.Module, batch: Any, loss: Loss) -> Memory:
    """Held and peak bytes of one forward and backward."""
    device = _device(module)
    with untouched(module), seeded(0):  # the layers that a step drops are drawn
        if device.type != "cuda":
            return _measure_storages(module, batch, loss)
        loss(module, batch).backward()  # allocates the libraries' workspaces, which stay
        module.zero_grad(set_to_none=True)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        value = loss(module, batch)
        held = torch.cuda.memory_allocated(device) - before
        value.backward()
        torch.cuda.synchronize(device)
        return Memory(held, torch.cuda.max_memory_allocated(device) - before)


def _measure_storages(module: nn.Module, batch: Any, loss: Loss) -> Memory:
    gc.collect()
    with LiveStorages() as storages:
        value = loss(module, batch)
        held = storages.bytes_alive
        value.backward()
        return Memory(held, storages.bytes_peak)


def count_flops(module: nn.Module, batch: Any, loss: Loss) -> Flops:
    """FLOPs of one forward and of its backward, in that order."""
    with untouched(module), seeded(0):
        with FlopCount() as forward:
            value = loss(module, batch)
        with FlopCount() as backward:
            value.backward()
        return Flops(forward.flops, backward.flops)


def recompute_flops(plain: Flops, technique: Flops) -> int:
    """FLOPs that the technique does again in backward."""
    return technique.backward - plain.backward


def time_step(
    module: nn.Module, batch: Any, loss: Loss, *, repeats: int = 5, warmup: int = 1
) -> StepTime:
    """Wall time of a forward and backward; the device is waited for."""
    device, seconds = _device(module), []
    with untouched(module):
        for _ in range(warmup + repeats):
            module.zero_grad(set_to_none=True)
            _wait(device)
            start = time.perf_counter()
            loss(module, batch).backward()
            _wait(device)
            seconds.append(time.perf_counter() - start)
    seconds = seconds[warmup:]
    return StepTime(statistics.median(seconds), min(seconds), max(seconds))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
