"""Measure a training step on CPU or CUDA: held and peak bytes, FLOPs, seconds.

On CPU the bytes are exact and repeatable: every storage that an operation creates is followed until
it is freed. On CUDA they are the allocator's. Each pass runs under one instrument only, because an
instrument keeps tensors alive that another one would count.

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
    """Held and peak bytes of one step, without the parameters, buffers and batch that it needs."""

    # Activation storages alive after forward.
    held_bytes: int

    # The most bytes alive at any moment of forward and backward, gradients included.
    peak_bytes: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products, convolutions and attention; `backward` includes recomputation."""

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
    """One storage, from the operation that made it to the operation that no longer found it."""

    nbytes: int

    # The value of the `owner` function when the storage was made, such as a layer's name.
    owner: Any

    # Number of the operation that made it.
    born: int

    # Number of the first operation that no longer found it; None while it is alive.
    died: int | None = None

    # Whether an operation of another owner has used it.
    used_elsewhere: bool = False


class LiveStorages(TorchDispatchMode):
    """Mode that follows every storage made inside it until the storage is freed.

    `owner` is called to get the owner of each new storage. With `device`, only storages on devices
    of that type count.
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
        """Count a tensor that existed before; a storage already followed keeps its first owner."""
        self._meet(tensor, was_there=False, owner=owner)

    def lives_of(self, tensor: Tensor) -> list[Life]:
        """Return the records of a tensor's storages; empty if they existed before the mode."""
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
            life = None if known is None else known[1]
            if was_there and life is not None and self._owner() != life.owner:
                life.used_elsewhere = True
            if known is None or known[0]() is None:
                counts = not was_there and storage.nbytes() > 0
                new_life = Life(storage.nbytes(), owner or self._owner(), self.num_operations)
                self._watch(storage, new_life, counts)

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
    """Return the storage of a tensor, or both storages of a sparse COO tensor."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return [tensor.untyped_storage()]


class FlopCount(TorchDispatchMode):
    """Mode that adds up the FLOPs of every operation that torch has a formula for.

    Attention has a formula of our own: torch leaves out its CPU kernel, and before 2.13 it refuses
    grouped-query heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += operation_flops(func, args, kwargs or {}, out)
        return out


def measure_memory(module: nn.Module, batch: Any, loss: Loss) -> Memory:
    """Measure the held and peak bytes of one forward and backward."""
    device = _device(module)

    # The seed fixes which layers a step drops, in models that drop layers at random.
    with untouched(module), seeded(0):
        if device.type != "cuda":
            return _measure_storages(module, batch, loss)

        # The first step allocates the workspaces of the libraries, which stay allocated.
        loss(module, batch).backward()
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
    """Count the FLOPs of one forward and its backward."""
    with untouched(module), seeded(0):
        with FlopCount() as forward:
            value = loss(module, batch)
        with FlopCount() as backward:
            value.backward()
        return Flops(forward.flops, backward.flops)


def recompute_flops(plain: Flops, technique: Flops) -> int:
    """Return the FLOPs that a technique recomputes in backward."""
    return technique.backward - plain.backward


def time_step(
    module: nn.Module, batch: Any, loss: Loss, *, repeats: int = 5, warmup: int = 1
) -> StepTime:
    """Measure the wall time of a forward and backward, synchronized with the device."""
    device = _device(module)
    seconds = []
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
