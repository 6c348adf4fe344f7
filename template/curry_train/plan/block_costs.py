"""What one block costs in each way to run it: bytes held, bytes on top, and seconds, measured on the block alone.

Proof: `python -m pytest tests/test_menu.py`.
"""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter, tree_map

from ..core import operations
from ..core.flops import operation_flops
from ..core.layers import tensors_in
from ..core.measure import LiveStorages
from ..core.untouched import seeded
from .device_profile import DeviceProfile
from .operation_cost import operation_cost
from .options import NONE, REGIONS, SAC, Option, apply_options, remove_options
from .step_lives import ASKS_FOR_DEVICE


@dataclass(frozen=True)
class Measured:
    """A block in one way to run it. `again` marks the operations of forward and of recomputation, in which selective
    recompute makes Python work on each."""

    held: int
    transient: int
    flops: Any
    moved: Any
    again: Any
    moved_away: int = 0  # bytes that offload takes to the host

    def seconds(self, option: Option, profile: DeviceProfile, dtype: str) -> float:
        extra = {SAC: profile.sac_seconds, REGIONS: profile.regions_seconds}.get(option.kind, 0.0)
        times = profile.operation_seconds(
            self.flops, self.moved, dtype=dtype, extra_seconds=extra * self.again
        )
        return float(times[self.moved > 0].sum())


class BlockLives(LiveStorages):
    """Storages, FLOPs and bytes of one block's forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[tuple[int, int, bool]] = []
        self.forward = True
        self.calls: list[
            tuple[str, int, int]
        ] = []  # family, bytes and FLOPs of each expensive call of the forward
        self.again: str | None = None  # the module that runs, of those that are to be run once more
        self.remembered: set[int] = set()  # storages of its buffers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_DEVICE:
            return args[0].device
        if self.again is not None:
            self._check_again(func, args, kwargs or {})
        out = super().__torch_dispatch__(func, types, args, kwargs)
        flops, moved = operation_cost(func, args, kwargs or {}, out)
        self.costs.append((flops, moved, self.forward or torch.is_grad_enabled()))
        family = operations.family_of(func) if isinstance(func, operations.Operation) else None
        if self.forward and family:
            made = sum(
                value.untyped_storage().nbytes()
                for value in tree_iter(out)
                if isinstance(value, Tensor)
            )
            again = operation_flops(func, args, kwargs or {}, out)
            drawn = operations.draws(
                func, args, kwargs or {}
            )  # and so is never kept: nothing is gained by keeping it
            self.calls.append((family, 0, 0) if drawn else (family, made, again))
        return out

    def watch(self, path: str, module: nn.Module) -> list[Any]:
        """From here on the module may be run once more, which it has to bear."""

        def enter(*_: Any) -> None:
            self.again = path
            self.remembered = {buffer.untyped_storage()._cdata for buffer in module.buffers()}

        def leave(*_: Any) -> None:
            self.again = None

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def _check_again(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if operations.draws(func, args, kwargs):
            raise ValueError(
                f"{self.again} draws random numbers, and would draw others the second time"
            )
        written = [args[0]] if args and operations.writes_in_place(func) else []
        if any(
            isinstance(value, Tensor) and value.untyped_storage()._cdata in self.remembered
            for value in written
        ):
            raise ValueError(f"{self.again} changes a buffer, and would change it a second time")


@dataclass(frozen=True)
class BlockKind:
    """Blocks that cost the same: one of them, what it is called with, and the names of all."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]

    @functools.cached_property
    def plain(self) -> tuple[Measured, list[tuple[str, int, int]]]:
        """The block as it is."""
        return self.run(Option(NONE))

    def run(self, option: Option) -> tuple[Measured, list[tuple[str, int, int]]]:
        """Forward and backward of the block, which is left as it was; and the expensive calls of its forward."""
        holder, trained = (
            nn.ModuleList([self.block]),
            [p for p in self.block.parameters() if p.requires_grad],
        )
        for parameter in trained:
            parameter.grad = None
        leaves, handles = tree_map(_leaf, (self.args, self.kwargs)), list[Any]()
        try:
            with drop_saved() as drop:
                apply_options(holder, {"0": option}, offload=drop)
                gc.collect()
                with seeded(0), torch.enable_grad(), BlockLives() as lives:
                    for path in option.also:
                        handles += lives.watch(path, self.block.get_submodule(path))
                    args, kwargs = tree_map(_passed_on, leaves)
                    output = holder[0](*args, **kwargs)
                    del (
                        args,
                        kwargs,
                    )  # what goes in counts if it is kept, what comes out if it is kept for its own sake
                    outputs = [
                        tensor.clone() for tensor in tensors_in(output) if tensor.requires_grad
                    ]
                    made = {
                        life for tensor in tensors_in(output) for life in lives.lives_of(tensor)
                    }
                    del output
                    beside = sum(tensor.nbytes for tensor in outputs)
                    # What comes out and stays is what the next block keeps as its input, and counted there.
                    passed_on = sum(life.nbytes for life in made if life.died is None)
                    held = lives.bytes_alive - beside - passed_on
                    lives.forward, lives.bytes_peak = False, lives.bytes_alive
                    if outputs:
                        torch.autograd.backward(
                            outputs, [torch.empty_like(tensor) for tensor in outputs]
                        )
        finally:
            for handle in handles:
                handle.remove()
            remove_options(holder)
            for parameter in trained:
                parameter.grad = None
        flops, moved, again = (
            numpy.array(column, dtype=numpy.float64) for column in zip(*lives.costs, strict=True)
        )
        away = drop.bytes_away
        return Measured(
            held, lives.bytes_peak - beside - held, flops, moved, again, away
        ), lives.calls


class Drop:
    """What offload does to the device's bytes, for tensors without values: they are gone until backward asks."""

    def __init__(self) -> None:
        self.bytes_away = 0
        self.known: dict[
            int, weakref.ref[Any]
        ] = {}  # a storage that is gone leaves its address to others
        self.changed: list[nn.Module] = []

    def __call__(self, model: nn.Module, names: Sequence[str]) -> None:
        for name in names:
            block = model.get_submodule(name)
            known = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
            block.forward = self._dropping(block.forward, known)
            self.changed.append(block)

    def _dropping(self, forward: Callable[..., Any], known: set[int]) -> Callable[..., Any]:
        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata in known or isinstance(tensor, nn.Parameter):
                return tensor
            before = self.known.get(storage._cdata)
            if before is None or before() is None:
                self.known[storage._cdata] = weakref.ref(storage)
                self.bytes_away += storage.nbytes()
            return tensor.shape, tensor.stride(), tensor.dtype, tensor.device

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            shape, stride, dtype, device = kept
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

        def run(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return run


@contextlib.contextmanager
def drop_saved() -> Iterator[Drop]:
    """A stand-in for `offload_blocks`, undone at the end."""
    drop = Drop()
    try:
        yield drop
    finally:
        for block in drop.changed:
            del block.forward


def _passed_on(value: Any) -> Any:
    """As the block before makes it: no leaf, which autograd would keep."""
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _leaf(value: Any) -> Any:
    return (
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
    )
