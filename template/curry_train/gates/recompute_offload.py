"""Offload is the same training, and moves each storage once and no parameter.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one. Proof:
`python -m pytest tests/test_offload.py`.
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
LEAST_BYTES = 4096  # of a storage; smaller ones stay


def parity(case: Case, *, apply: Apply = OFFLOAD) -> Verdict:
    """One step with and without: loss, gradients, buffers and generators."""
    gate = "recompute/offload-parity"
    try:
        return same_training(gate, case, apply, alone=offload_one)
    except NothingToMove as nothing:
        return not_applicable(gate, required="bit-equal", why=str(nothing))


def moved_bytes(case: Case, *, apply: Apply = OFFLOAD) -> Verdict:
    """What forward copies on top of the plain forward, against what the same blocks of a plain model save."""
    gate, plain, module, batch = "recompute/offload-bytes", case.build(), case.build(), case.batch()
    try:
        names = apply(module, sample_of(case))
    except NothingToMove as nothing:
        return not_applicable(gate, required="each storage once", why=str(nothing))
    saved = SavedTensors(plain, names)
    ours, theirs = CopiedBytes(case.device), CopiedBytes(case.device)
    for model, copied, watched in (
        (plain, theirs, saved.watch()),
        (module, ours, contextlib.nullcontext()),
    ):
        with untouched(model), seeded(case.seed), watched, copied:
            _ = case.workload.mean_loss(model, batch)
    moved, most, least = ours.nbytes - theirs.nbytes, saved.num_bytes(), saved.num_bytes(sure=True)
    if not most:
        return not_applicable(
            gate, required="each storage once", why="the blocks save nothing that is large enough"
        )
    hint = ""
    if moved > most:
        hint = "a parameter, a buffer, or a storage that had moved already is copied: look storages up, not tensors"
    elif moved < least:
        hint = "what the blocks hold stays on the device, or is computed again: are the hooks around their forward?"
    everything = sum(tensor.nbytes for tensor in saved.tensors)
    measured = f"{format_bytes(moved)} moved, {moved / everything:.0%} of what save_on_cpu copies"
    span = format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"
    return Verdict(gate, not hint, measured, f"{span}: each storage once", hint)


GATES = (Gate("recompute/offload-parity", parity), Gate("recompute/offload-bytes", moved_bytes))


class SavedTensors:
    """All tensors that autograd saves while some modules of a model run: what `save_on_cpu` around them would copy."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model, self.modules = model, [model.get_submodule(name) for name in names]
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
        """Bytes of the storages that are large enough and no parameter's.

        A storage is `sure` to move if a tensor with a gradient, or one that fills half of it, was saved of it, unless
        it is a parameter in another precision. The others may stay, where nothing is lost by that.
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
            self.tensors.append(tensor)  # alive from here on, so that no address is used twice
        return tensor.detach()


class CopiedBytes(TorchDispatchMode):
    """Bytes that copies write while the mode is on: on CUDA those to the host, on CPU, which stands for both, all."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.nbytes, self.device = 0, device

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
    makers = [] if base.grad_fn is None else [maker for maker, _ in base.grad_fn.next_functions]
    if (
        len(makers) == 1
        and getattr(getattr(makers[0], "variable", base), "dtype", base.dtype) != base.dtype
    ):
        return False
    return tensor.requires_grad or 2 * tensor.nbytes >= tensor.untyped_storage().nbytes()
