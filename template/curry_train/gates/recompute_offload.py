"""Gates of offload: the same training, each storage moved once, and no parameter moved.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one.

Proof: `python -m pytest tests/test_offload.py`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.sizes import format_bytes
from ..core.untouched import seeded, untouched
from ..core.verdict import Gate, Verdict, not_applicable
from ..core.workload import Case
from ..plan.offload_strategies import offload_one
from ..plan.same_training import same_training, sample_of
from ..plan.strategies import STRATEGIES
from ..plan.strategy import Apply
from ..primitives.offload import NothingToMove

OFFLOAD = STRATEGIES["offload"].apply
LEAST_BYTES = 4096  # smaller storages stay on the device


def parity(case: Case, *, apply: Apply = OFFLOAD) -> Verdict:
    """Compare loss, gradients, buffers and generators of one step with and without offload."""
    gate = "recompute/offload-parity"
    try:
        return same_training(gate, case, apply, alone=offload_one)
    except NothingToMove as nothing:
        return not_applicable(gate, required="bit-equal", why=str(nothing))


def moved_bytes(case: Case, *, apply: Apply = OFFLOAD) -> Verdict:
    """Compare the bytes copied in forward with those that the same plain blocks save."""
    gate = "recompute/offload-bytes"
    plain = case.build()
    module = case.build()
    batch = case.batch()
    try:
        names = apply(module, sample_of(case))
    except NothingToMove as nothing:
        return not_applicable(gate, required="each storage once", why=str(nothing))

    saved = SavedTensors(plain, names)
    plain_copies = CopiedBytes(case.device)
    with untouched(plain), seeded(case.seed), saved.watch(), plain_copies:
        _ = case.workload.mean_loss(plain, batch)
    copies = CopiedBytes(case.device)
    with untouched(module), seeded(case.seed), copies:
        _ = case.workload.mean_loss(module, batch)

    moved = copies.nbytes - plain_copies.nbytes
    most = saved.num_bytes()
    least = saved.num_bytes(sure=True)
    if not most:
        return not_applicable(
            gate, required="each storage once", why="the blocks save nothing that is large enough"
        )

    hint = ""
    if moved > most:
        hint = (
            "a parameter, a buffer, or a storage that had moved already is copied: look up "
            "storages, not tensors"
        )
    elif moved < least:
        hint = (
            "activations of the blocks stay on the device, or are recomputed: check that the hooks "
            "are active during the blocks' forward"
        )
    everything = sum(tensor.nbytes for tensor in saved.tensors)
    measured = f"{format_bytes(moved)} moved, {moved / everything:.0%} of what save_on_cpu copies"
    span = format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"
    return Verdict(gate, not hint, measured, f"{span}: each storage once", hint)


GATES = (Gate("recompute/offload-parity", parity), Gate("recompute/offload-bytes", moved_bytes))


class SavedTensors:
    """The tensors that autograd saves while some modules run, as `save_on_cpu` would copy them."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model = model
        self.modules = [model.get_submodule(name) for name in names]
        self.tensors: list[Tensor] = []
        self.open: list[saved_tensors_hooks] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        handles = [module.register_forward_pre_hook(self._enter) for module in self.modules]
        handles += [module.register_forward_hook(self._leave) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while self.open:  # a module raised
                self._leave()

    def num_bytes(self, *, sure: bool = False) -> int:
        """Count the bytes of the storages that are large enough and not of parameters or buffers.

        With `sure` only storages that must move are counted: those with a saved tensor that
        requires a gradient or fills at least half of the storage, unless it is a cast of a
        parameter. The others may stay on the device.
        """
        owned = {_address(tensor) for tensor in [*self.model.parameters(), *self.model.buffers()]}
        groups: dict[int, list[Tensor]] = {}
        for tensor in self.tensors:
            if tensor.untyped_storage().nbytes() >= LEAST_BYTES and _address(tensor) not in owned:
                groups.setdefault(_address(tensor), []).append(tensor)
        sizes = {address: group[0].untyped_storage().nbytes() for address, group in groups.items()}
        return sum(
            size
            for address, size in sizes.items()
            if not sure or any(map(_is_sure, groups[address]))
        )

    def _enter(self, *_: Any) -> None:
        self.open.append(saved_tensors_hooks(self._keep, lambda tensor: tensor))
        self.open[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self.open.pop().__exit__()

    def _keep(self, tensor: Tensor) -> Tensor:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
            self.tensors.append(tensor)  # held alive, so that no address is reused
        return tensor.detach()


class CopiedBytes(TorchDispatchMode):
    """Count the bytes that copies write: to the host on CUDA, all of them on CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.nbytes = 0
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in COPIES and isinstance(out, Tensor):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if self.device.type == source.device.type and out.device.type == "cpu":
                self.nbytes += out.nbytes
        return out


COPIES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_sure(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    sources = [] if base.grad_fn is None else [node for node, _ in base.grad_fn.next_functions]
    if len(sources) == 1:
        parameter = getattr(sources[0], "variable", base)
        if getattr(parameter, "dtype", base.dtype) != base.dtype:  # a cast of a parameter
            return False
    return tensor.requires_grad or 2 * tensor.nbytes >= tensor.untyped_storage().nbytes()
