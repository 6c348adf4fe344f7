"""Models whose tensors have shapes and no values: an 8B model takes no memory, and its bytes can be counted.

    with pretended():
        model = build()              # on the CPU, whatever device it names
    with pretended(kernels="cuda"):
        loss(model, batch).backward()

With `kernels="cuda"` attention, RMS norm and autocast keep what they keep on CUDA. Whole numbers have values, because a
model's own code looks at positions, masks and token ids; a shape that depends on them is that of the ones drawn.
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
    """An operation that can't do with shapes, or whose kernel keeps what shapes do not tell."""

    def __init__(
        self, func: Any, why: str = "it needs values, which an estimate from shapes does not have"
    ) -> None:
        self.func, self.why = func, why
        super().__init__(f"{func}: {why}")


KERNELS = ("cpu", "cuda")
NUMBERS = (
    torch.arange,
    torch.linspace,
    torch.logspace,
    torch.randint,
    torch.randperm,
    torch.tensor,
    torch.as_tensor,
)
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
    """Every tensor that is made here has no values. Tensors of one `mode` may be used together; CUDA is the CPU."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {KERNELS}, got {kernels!r}")
    mode = mode or KernelsAsTheyRun(allow_non_fake_inputs=True)
    original, log = nn.Module._apply, logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True  # it prints every error that is raised here as well
    nn.Module._apply = _apply  # type: ignore[method-assign]
    truncated = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = (
        _as_it_is  # in 2.13 it draws until all values are within: there are none
    )
    try:
        with (
            mode,
            as_on_cuda() if kernels == "cuda" else contextlib.nullcontext(),
            _Here(cuda=kernels == "cuda"),
        ):
            yield mode
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
        torch.nn.init._no_grad_trunc_normal_ = truncated
        log.disabled = disabled


def _as_it_is(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


class PretendedCase(Case):
    """A case whose modules and batches have no values, beside whole numbers; for use inside `pretended`."""

    def build(self) -> nn.Module:
        with seeded(self.seed):
            module = _without_real(self.workload.build())
            return module.to(self.device, self.dtype).train()

    def batch(self, size: int | None = None) -> Any:
        return map_tensors(
            super().batch(size),
            lambda part: _without_values(part) if part.is_floating_point() else part,
        )


def _without_real(module: nn.Module) -> nn.Module:
    """A copy where the factory had weights from elsewhere, which stay as they are."""
    tensors = [*module.parameters(), *module.buffers()]
    real = {
        id(tensor): _without_values(tensor)
        for tensor in tensors
        if not isinstance(tensor, FakeTensor)
    }
    return (
        copy.deepcopy(module, {**real, **{id(t): t for t in tensors if isinstance(t, FakeTensor)}})
        if real
        else module
    )


def _without_values(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    made: Tensor = mode.from_tensor(tensor, static_shapes=True)
    return made


def _apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """`Module.to` and its like for parameters without values, which torch 2.11 to 2.13 refuses to swap."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.data = function(parameter.data)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


class _Here(TorchFunctionMode):
    """CUDA stands for the CPU, where a build without CUDA would abort; and some kernels for others."""

    def __init__(self, *, cuda: bool) -> None:
        super().__init__()
        self.cuda = cuda
        self.stand_ins: Mapping[Any, Callable[..., Any]] = STAND_INS if cuda else {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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
    """Positions, masks and token ids keep their values, because a model's own code may look at them."""
    if args and isinstance(args[0], FakeTensor):
        return False
    found = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    if found:
        return not any(isinstance(tensor, FakeTensor) for tensor in found)
    dtype = WRITTEN.get(kwargs.get("dtype"), kwargs.get("dtype"))
    return function in NUMBERS or (
        dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A tensor without values copied as one, where torch reads its address and warns that it has none."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(copied) if isinstance(tensor, nn.Parameter) else copied
        memo[id(tensor)].requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            vars(memo[id(tensor)]).setdefault(
                name, copy.copy(value)
            )  # what the model has noted on its parameter
    result: Tensor = memo[id(tensor)]
    return result


def _address(tensor: Tensor) -> int:
    """Another for each storage, for code that looks for shared ones."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize


def _refuse(func: str, *why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NeedsValues(func, *why)

    return refuse


NOTHING = {Tensor.cuda, Tensor.pin_memory}
ITS_OWN: Mapping[Any, Callable[..., Any]] = {
    Tensor.__deepcopy__: _copied,
    Tensor.data_ptr: _address,
    Tensor.numpy: _refuse("Tensor.numpy"),
    Tensor.__array__: _refuse("numpy.array"),
    **{
        getattr(torch._VF, name): _refuse(name, "its kernel keeps a state that shapes do not tell")
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
NOT_AS_USUAL = {*NOTHING, *ITS_OWN}
