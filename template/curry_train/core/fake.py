"""Fake models, whose tensors have shapes but no values, to count bytes without memory.

    with pretended():
        model = build()              # on the CPU, whatever device it names
    with pretended(kernels="cuda"):
        loss(model, batch).backward()

With `kernels="cuda"` attention, RMS norm and autocast save what they save on CUDA. Integer and
boolean tensors keep their values, because models read positions, masks and token ids; a shape that
depends on such values is that of the values drawn.

Proof: `python -m pytest tests/test_fake.py`.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from .batches import map_tensors
from .cuda_kernels import IN_FLOAT32, STAND_INS, as_on_cuda, in_float32
from .fake_kernels import KernelsAsTheyRun
from .untouched import seeded
from .workload import Case


class NeedsValues(RuntimeError):
    """An operation needs values, or its memory does not follow from shapes."""

    def __init__(
        self, func: Any, why: str = "it needs values, which an estimate from shapes does not have"
    ) -> None:
        self.func = func
        self.why = why
        super().__init__(f"{func}: {why}")


KERNELS = ("cpu", "cuda")
# Functions that make tensors of numbers, whose values are kept.
NUMBERS = (
    torch.arange,
    torch.linspace,
    torch.logspace,
    torch.randint,
    torch.randperm,
    torch.tensor,
    torch.as_tensor,
)
# Python types that may be passed as dtype.
WRITTEN: dict[Any, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}
NEEDS_VALUES = (
    NeedsValues,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextlib.contextmanager
def pretended(
    *, mode: FakeTensorMode | None = None, kernels: str = "cpu"
) -> Iterator[FakeTensorMode]:
    """Make all new tensors fake, and map CUDA devices to the CPU.

    Only tensors of the same `mode` can be used together.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {KERNELS}, got {kernels!r}")
    mode = mode or KernelsAsTheyRun(allow_non_fake_inputs=True)

    # torch logs every error that it raises for fake tensors; silence that.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log_was_disabled = log.disabled
    log.disabled = True

    original_apply = nn.Module._apply
    nn.Module._apply = _apply  # type: ignore[method-assign]

    # In torch 2.13 this redraws until all values are in range, which never ends without values.
    original_trunc_normal = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = _as_it_is
    try:
        with (
            mode,
            as_on_cuda() if kernels == "cuda" else contextlib.nullcontext(),
            _Here(cuda=kernels == "cuda"),
        ):
            yield mode
    finally:
        nn.Module._apply = original_apply  # type: ignore[method-assign]
        torch.nn.init._no_grad_trunc_normal_ = original_trunc_normal
        log.disabled = log_was_disabled


def _as_it_is(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


class PretendedCase(Case):
    """A case with fake modules and batches, for use inside `pretended`; integers stay real."""

    def build(self) -> nn.Module:
        with seeded(self.seed):
            module = _without_real(self.workload.build())
            return module.to(self.device, self.dtype).train()

    def batch(self, size: int | None = None) -> Any:
        return map_tensors(
            super().batch(size),
            lambda tensor: _without_values(tensor) if tensor.is_floating_point() else tensor,
        )


def _without_real(module: nn.Module) -> nn.Module:
    """Return a copy with fake tensors if the factory used real weights; those stay unchanged."""
    tensors = [*module.parameters(), *module.buffers()]
    if all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return module
    replacements = {id(tensor): _without_values(tensor) for tensor in tensors}
    return copy.deepcopy(module, replacements)


def _without_values(tensor: Tensor) -> Tensor:
    """Return a fake tensor of the same shape, or the tensor itself if it is fake."""
    if isinstance(tensor, FakeTensor):
        return tensor
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    fake_tensor: Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake_tensor


def _apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Replace `Module._apply`, since torch 2.11 to 2.13 refuses to swap fake parameters."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.data = function(parameter.data)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


class _Here(TorchFunctionMode):
    """Function mode that maps CUDA to the CPU, and can replace kernels by CUDA's stand-ins.

    Without it, a torch build without CUDA would raise an error where a model names that device.
    """

    def __init__(self, *, cuda: bool) -> None:
        super().__init__()
        self.cuda = cuda
        self.stand_ins: Mapping[Any, Callable[..., Any]] = STAND_INS if cuda else {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The most frequent case first: one fake tensor, and nothing that names a device.
        if (
            not kwargs
            and len(args) == 1
            and isinstance(args[0], FakeTensor)
            and function not in NOT_AS_USUAL
        ):
            return self._run(function, args, {})

        args = tuple(map(_on_cpu, args))
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"

        if function in NOTHING:
            return args[0]
        if function in ITS_OWN and any(isinstance(leaf, FakeTensor) for leaf in tree_iter(args)):
            return ITS_OWN[function](*args, **kwargs)
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if _has_values(function, args, kwargs):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        return self._run(function, args, kwargs)

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.cuda:
            if function in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
                args = tuple(map(in_float32, args))
                kwargs = {name: in_float32(value) for name, value in kwargs.items()}
            function = self.stand_ins.get(function, function)
        return function(*args, **kwargs)


def _has_values(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether to run a function on real tensors, as for positions, masks and token ids.

    A model's own code may read their values.
    """
    if args and isinstance(args[0], FakeTensor):
        return False
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    if tensors:
        return not any(isinstance(tensor, FakeTensor) for tensor in tensors)
    dtype = WRITTEN.get(kwargs.get("dtype"), kwargs.get("dtype"))
    return function in NUMBERS or (
        dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Deep-copy a fake tensor; torch would read its address and warn that it has none."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied)
        copied.requires_grad_(tensor.requires_grad)
        # Attributes that the model has set on its parameter.
        for name, value in vars(tensor).items():
            vars(copied).setdefault(name, copy.copy(value))
        memo[id(tensor)] = copied
    result: Tensor = memo[id(tensor)]
    return result


def _address(tensor: Tensor) -> int:
    """Return an address that is unique for each storage, for code that looks for shared ones."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize


def _refuse(func: str, *why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NeedsValues(func, *why)

    return refuse


# Methods that return the tensor itself.
NOTHING = {Tensor.cuda, Tensor.pin_memory}
# Replacements for methods of fake tensors.
ITS_OWN: Mapping[Any, Callable[..., Any]] = {
    Tensor.__deepcopy__: _copied,
    Tensor.data_ptr: _address,
    Tensor.numpy: _refuse("Tensor.numpy"),
    Tensor.__array__: _refuse("numpy.array"),
    **{
        getattr(torch._VF, name): _refuse(
            name, "its kernel keeps a state whose size does not follow from shapes"
        )
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
NOT_AS_USUAL = {*NOTHING, *ITS_OWN}
