"""Costs of one block under each option: held bytes, transient bytes and operations.

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
    """Costs of a block under one option."""

    held: int  # bytes held after forward
    transient: int  # the most bytes beside the held ones during backward
    flops: Any  # of each operation of forward and backward
    moved: Any  # bytes read and written by each operation
    again: Any  # 1 for operations of forward and recompute, which selective recompute slows down
    moved_away: int = 0  # bytes that offload moves to the host

    def seconds(self, option: Option, profile: DeviceProfile, dtype: str) -> float:
        """Predict the time of forward and backward; views, which move no bytes, take none."""
        extra = {SAC: profile.sac_seconds, REGIONS: profile.regions_seconds}.get(option.kind, 0.0)
        times = profile.operation_seconds(
            self.flops, self.moved, dtype=dtype, extra_seconds=extra * self.again
        )
        return float(times[self.moved > 0].sum())


class BlockLives(LiveStorages):
    """Record the storages, FLOPs and bytes moved of one block's forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[tuple[int, int, bool]] = []
        self.forward = True
        # Family, bytes of the output and FLOPs of each expensive call of the forward.
        self.calls: list[tuple[str, int, int]] = []
        # Path of the module that is running, if it is one of those to recompute.
        self.again: str | None = None
        # Storages of that module's buffers.
        self.remembered: set[int] = set()

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
            self._add_call(family, func, args, kwargs or {}, out)
        return out

    def _add_call(self, family: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        made = sum(
            value.untyped_storage().nbytes()
            for value in tree_iter(out)
            if isinstance(value, Tensor)
        )
        flops = operation_flops(func, args, kwargs, out)
        # A call that draws random numbers must not be kept: with 0 FLOPs, keeping it gains nothing.
        drawn = operations.draws(func, args, kwargs)
        self.calls.append((family, 0, 0) if drawn else (family, made, flops))

    def watch(self, path: str, module: nn.Module) -> list[Any]:
        """Check that a module can be recomputed: it draws no random numbers, changes no buffer.

        Return the handles of the hooks that are set.
        """

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
    """A group of blocks that cost the same, with one of them to measure."""

    block: nn.Module
    args: tuple[Any, ...]  # of the first call of the block
    kwargs: dict[str, Any]
    names: tuple[str, ...]  # of all blocks of the kind

    @functools.cached_property
    def plain(self) -> tuple[Measured, list[tuple[str, int, int]]]:
        """The costs of the block without recompute, and the expensive calls of its forward."""
        return self.run(Option(NONE))

    def run(self, option: Option) -> tuple[Measured, list[tuple[str, int, int]]]:
        """Run forward and backward of the block under an option, which is removed afterwards.

        Return the costs, and the expensive calls of the forward.
        """
        holder = nn.ModuleList([self.block])
        trained = [p for p in self.block.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = None
        leaves = tree_map(_leaf, (self.args, self.kwargs))
        handles = list[Any]()

        try:
            with drop_saved() as drop:
                apply_options(holder, {"0": option}, offload=drop)
                gc.collect()
                with seeded(0), torch.enable_grad(), BlockLives() as lives:
                    for path in option.also:
                        handles += lives.watch(path, self.block.get_submodule(path))
                    args, kwargs = tree_map(_passed_on, leaves)
                    output = holder[0](*args, **kwargs)
                    # Without a reference from here, inputs count only if the block holds them, and
                    # outputs only if the block holds them for its own backward.
                    del args, kwargs
                    outputs = [
                        tensor.clone() for tensor in tensors_in(output) if tensor.requires_grad
                    ]
                    made = {
                        life for tensor in tensors_in(output) for life in lives.lives_of(tensor)
                    }
                    del output
                    beside = sum(tensor.nbytes for tensor in outputs)

                    # An output that stays alive is the input that the next block holds, and is
                    # counted there.
                    passed_on = sum(life.nbytes for life in made if life.died is None)
                    held = lives.bytes_alive - beside - passed_on

                    lives.forward = False
                    lives.bytes_peak = lives.bytes_alive
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
        transient = lives.bytes_peak - beside - held
        return Measured(held, transient, flops, moved, again, drop.bytes_away), lives.calls


class Drop:
    """Stand in for offload on tensors without values: saved tensors are freed until backward."""

    def __init__(self) -> None:
        self.bytes_away = 0
        # By address, which a later storage may reuse once the first one is freed.
        self.known: dict[int, weakref.ref[Any]] = {}
        self.changed: list[nn.Module] = []

    def __call__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Wrap the forward of the named blocks."""
        for name in names:
            block = model.get_submodule(name)
            parameters = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
            block.forward = self._dropping(block.forward, parameters)
            self.changed.append(block)

    def _dropping(self, forward: Callable[..., Any], parameters: set[int]) -> Callable[..., Any]:
        """Return the forward with saved tensors replaced by their shape, stride, dtype and device.

        Parameters are saved as they are.
        """

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata in parameters or isinstance(tensor, nn.Parameter):
                return tensor
            before = self.known.get(storage._cdata)
            if before is None or before() is None:
                self.known[storage._cdata] = weakref.ref(storage)
                self.bytes_away += storage.nbytes()
            return tensor.shape, tensor.stride(), tensor.dtype, tensor.device

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            shape, stride, dtype, device = packed
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

        def run(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return run


@contextlib.contextmanager
def drop_saved() -> Iterator[Drop]:
    """Provide a stand-in for `offload_blocks`, undone at the end of the context."""
    drop = Drop()
    try:
        yield drop
    finally:
        for block in drop.changed:
            del block.forward


def _passed_on(value: Any) -> Any:
    """Return a tensor as the previous block would pass it: no leaf, which autograd would hold."""
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _leaf(value: Any) -> Any:
    """Detach a tensor from its graph."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value
