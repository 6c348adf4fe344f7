"""Offload activations of blocks to CPU memory and copy them back during backward.

    offload_blocks(model)    # all blocks but the last
    # Count and reserve the host memory before the first step:
    offload_blocks(model, batch=batch, loss=loss)
    print(offload_report(model).table())

Each storage is moved once, however many views of it are saved. Parameters, buffers and small
tensors stay on the device.

Proof: `python -m pytest tests/test_offload.py`.
"""

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..core.blocks import find_blocks
from ..core.derive import Derived, become, restore
from ..core.host_memory import HostMemoryShort
from ..core.host_storages import CastAgain, Lane, OffloadReport, Saved, Stays, Step
from ..core.recipes import CAST
from ..core.untouched import untouched

__all__ = [
    "HostMemoryShort",
    "NothingToMove",
    "OffloadReport",
    "offload_blocks",
    "offload_report",
    "remove_offload",
]

OFFLOADER = "_offloader"
PLAIN = (Tensor, nn.Parameter)
VALUE = operator.methodcaller("value")
# Reasons for leaving a tensor on the device.
PARAMETER = "parameter or buffer"
WEIGHT_CAST = "cast of a parameter"
DUPLICATE = "duplicate"
SMALL = "too small"
SLICE = "slice of data"
ALIAS = "alias of what moved"
OTHER = "no plain tensor of the device"


class NothingToMove(ValueError):
    """Raised when the blocks save nothing that offload could move."""


class Offloaded(Derived):
    """A block whose saved tensors are on the host until backward.

    In eval mode, without grad mode and in compiled code it behaves as the original block.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with self.__dict__[OFFLOADER].hooks(self, (args, kwargs)):
            return super().forward(*args, **kwargs)


class Surroundings:
    """The tensors that one call of a block must leave on the device."""

    def __init__(self, step: Step, block: nn.Module, inputs: Any) -> None:
        self.owned = step.owned | _addresses(block)
        self.device = next((parameter.device.type for parameter in block.parameters()), None)
        leaves = [
            leaf
            for leaf in tree_leaves(inputs)
            if type(leaf) is Tensor and leaf.layout is torch.strided
        ]
        data = {_address(leaf): leaf for leaf in leaves if not leaf.requires_grad}
        # Moving a slice of a tensor that the caller holds, such as a data set on the device, frees
        # nothing.
        self.slices = {address for address, leaf in data.items() if 2 * leaf.nbytes < _size(leaf)}

    def why_it_stays(self, tensor: Tensor, base: Tensor, min_bytes: int) -> str | None:
        """Return the reason to leave a tensor on the device, or None to move its storage."""
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
            return OTHER
        if isinstance(base, nn.Parameter) or _address(tensor) in self.owned:
            return PARAMETER
        # Such as the seed of a kernel, which is on the host.
        if self.device not in (None, tensor.device.type):
            return OTHER
        if tensor.is_conj() or tensor.is_neg() or _size(tensor) % tensor.itemsize:
            return OTHER
        if _size(tensor) < max(1, min_bytes):
            return SMALL
        if _weight_of_cast(base) is not None:
            return WEIGHT_CAST
        return SLICE if _address(tensor) in self.slices else None


class Offloader:
    """State shared by the offloaded blocks of a model."""

    def __init__(self, model: nn.Module | None, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.model = (lambda: None) if model is None else weakref.ref(model)
        self.lanes: dict[torch.device, Lane] = {}
        self.counted: list[tuple[torch.device, int]] | None = None
        self.step: Callable[[], Step | None] = lambda: None
        self.report = OffloadReport()
        self.lock = threading.RLock()

    def __getstate__(self) -> Any:
        return self.model(), self.min_bytes

    def __setstate__(self, state: Any) -> None:
        Offloader.__init__(self, *state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offloader":
        # The copy of the model, if the whole model is being copied.
        return Offloader(memo.get(id(self.model())), self.min_bytes)

    def lane(self, device: torch.device) -> Lane:
        if device not in self.lanes:
            self.lanes[device] = Lane(device)
        return self.lanes[device]

    def hooks(self, block: nn.Module, inputs: Any) -> saved_tensors_hooks:
        with self.lock:
            step = self.step()
            if step is None or step.unpacked:
                model = self.model()
                # Leave out the block's own tensors: FSDP2 frees them after the block's forward, and
                # their addresses are reused.
                step = Step(frozenset() if model is None else _addresses(model) - _addresses(block))
                self.step = weakref.ref(step)
                self.report = step.report
        return saved_tensors_hooks(
            functools.partial(self.pack, step, Surroundings(step, block, inputs)), VALUE
        )

    def pack(self, step: Step, around: "Surroundings", tensor: Tensor) -> Saved | Stays:
        """Return the object that autograd holds in place of a tensor."""
        base = tensor if tensor._base is None else tensor._base
        reason = around.why_it_stays(tensor, base, self.min_bytes)
        with self.lock:
            moved = None
            if reason in (None, SLICE):
                moved = step.moved.get(_address(tensor))
            if moved is not None and moved.source() is not None:
                reason = DUPLICATE if moved.is_same(tensor, base) else ALIAS
            if reason is None:
                return self._move(step, tensor, base)
            step.report.skip(tensor, reason)
            if moved is not None and reason == DUPLICATE:
                return step.save(moved, tensor)

        weight = _weight_of_cast(base) if reason == WEIGHT_CAST else None
        return Stays(tensor, step) if weight is None else CastAgain(tensor, weight, step)

    def _move(self, step: Step, tensor: Tensor, base: Tensor) -> Saved:
        if self.counted is None:
            return step.move(tensor, base, self.lane(tensor.device))
        self.counted.append((tensor.device, _size(tensor)))
        return step.move(tensor, base, None)

    def reserve(
        self, model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        """Count the bytes that one forward would move, and reserve the host memory for them."""
        self.counted = []
        try:
            with untouched(model):
                loss(model, batch)
            sizes = self.counted
        finally:
            self.counted = None
            self.step = lambda: None
            self.report = OffloadReport()

        if not sizes:
            raise NothingToMove(
                f"the blocks save nothing of {self.min_bytes:,} bytes or more that could move: use "
                "a larger batch, lower min_bytes, name other blocks, or leave offload out"
            )
        for device in {device for device, _ in sizes}:
            self.lane(device).pool.reserve(nbytes for source, nbytes in sizes if source == device)


def offload_blocks(
    model: nn.Module,
    *,
    blocks: str | Sequence[str] | None = None,
    min_bytes: int = 4096,
    keep_last: int = 1,
    batch: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> list[str]:
    """Offload the blocks of a model, in place, and return the names of the offloaded ones.

    The last `keep_last` blocks are not offloaded: backward starts with them, so their tensors would
    be copied back at once. With `batch` and `loss` one forward counts the bytes, so that
    `HostMemoryShort` is raised here and not during a step. Call this before DDP, `fully_shard` and
    `torch.compile`.
    """
    for name, value in (("min_bytes", min_bytes), ("keep_last", keep_last)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number from 0 up, got {value!r}")
    if batch is not None and loss is None:
        raise ValueError("batch is given and loss is not: counting the bytes of a step needs both")
    if any(isinstance(module, Offloaded) for module in model.modules()):
        raise ValueError(
            "blocks of this model are offloaded already: call remove_offload(model) first"
        )

    found = find_blocks(model, blocks)
    names = list(found)[: len(found) - keep_last]
    if not names:
        raise ValueError(
            f"keep_last={keep_last} leaves none of the {len(found)} blocks to offload: lower it"
        )
    if batch is not None and not any(found[name].training for name in names):
        raise ValueError(
            "the blocks are in eval mode, where nothing is moved: call model.train() first"
        )

    offloader = Offloader(model, min_bytes)
    for name in names:
        become(Offloaded, found[name], **{OFFLOADER: offloader})
    if batch is not None and loss is not None:
        try:
            offloader.reserve(model, batch, loss)
        except BaseException:
            remove_offload(model)
            raise
    return names


def remove_offload(model: nn.Module) -> list[str]:
    """Undo `offload_blocks`, free the host memory, and return the offloaded blocks' names."""
    names = [name for name, module in model.named_modules() if isinstance(module, Offloaded)]
    for name in names:
        module = model.get_submodule(name)
        offloader: Offloader = module.__dict__[OFFLOADER]
        restore(module, OFFLOADER)
        for lane in offloader.lanes.values():
            lane.pool.clear()
    return names


def offload_report(model: nn.Module) -> OffloadReport:
    """Report what the last step of a model with offloaded blocks has moved so far."""
    for module in model.modules():
        if isinstance(module, Offloaded):
            offloader: Offloader = module.__dict__[OFFLOADER]
            reserved = sum(lane.pool.reserved_bytes for lane in offloader.lanes.values())
            return replace(
                offloader.report, reserved_bytes=reserved, skipped=dict(offloader.report.skipped)
            )
    raise ValueError("no block of this model is offloaded: call offload_blocks(model) first")


def _addresses(module: nn.Module) -> frozenset[int]:
    """Return the storage addresses of a module's parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return frozenset(_address(tensor) for tensor in tensors if type(tensor) in PLAIN)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError as error:
        raise RuntimeError(
            "offloaded blocks can't run inside torch.func: call remove_offload(model) first"
        ) from error


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _weight_of_cast(base: Tensor) -> Tensor | None:
    """Return the parameter that a tensor is a cast of, if any."""
    node = base.grad_fn
    if node is None or node.name() != CAST or base._version:
        return None
    weight: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    if weight is None or type(weight) not in PLAIN or weight.device != base.device:
        return None
    return weight if weight.shape == base.shape and weight.stride() == base.stride() else None
