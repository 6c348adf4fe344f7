"""Run operations on shapes alone with the bytes that the real kernels hold.

    with KernelsAsTheyRun():
        ...

The differences are those of torch 2.11 and 2.13. Each correction has a test that fails when it is
no longer needed.

Proof: `python -m pytest tests/plan/test_fake.py`.
"""

import contextlib
import copy
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_iter

from ..core.generators import seeded
from ..core.measure import local_tensors, operands, tensors_in
from ..core.wording import format_bytes
from ..primitives.rerun import function_modes
from ..workloads.optimizers import SteppedOnHost
from ..workloads.workload import Case, map_tensors
from .optimizers import ValuesInSteps, capturable_anywhere, in_modes, take_eagerly

# Corrections of fake tensor kernels that differ from the real ones.

aten = torch.ops.aten
NORM_BACKWARD = aten.native_layer_norm_backward.default
BATCH_NORM = aten.native_batch_norm.default
GROUP_NORM = aten.native_group_norm.default
NORM_FORWARDS = (BATCH_NORM, GROUP_NORM, aten.native_layer_norm.default)
BATCH_NORM_BACKWARD = aten.native_batch_norm_backward.default
GROUP_NORM_BACKWARD = aten.native_group_norm_backward.default
# In torch before 2.14 outputs and gradients of a group norm are contiguous, whatever it is given.
GROUP_NORM_KEEPS_LAYOUT = torch.__version__ >= "2.14"
# By its name before torch 2.14, and from then on.
CHECKPOINT_GENERATOR = max(
    name for name in vars(checkpoint) if name.startswith("_checkpoint_without_reentrant_generator")
)
LIFT_OPERATION = aten.lift_fresh.default
GROUPED_MM_OPERATION = aten._grouped_mm.default
READ_OPERATION = aten._local_scalar_dense.default
INDEX = aten.index.Tensor
INDEX_SELECT = aten.index_select.default
# Losses that allocate a value for each element, and resize that storage to the sum or mean.
RESIZED_LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
# Alignment in bytes of the rows of a grouped matrix product.
ROW_ALIGNMENT_BYTES = 16


class KernelsAsTheyRun(FakeTensorMode):
    """Fake tensor mode with outputs like those of the real kernels.

    Views of real tensors stay real, norms return the layouts and dtypes of the real kernels, and
    grouped matrix products accept the kernel's dtypes, which on the CPU are more than bfloat16.
    """

    def __init__(self, *, kernels: str = "cpu") -> None:
        super().__init__(allow_non_fake_inputs=True)
        # The device whose kernels are meant; their statistics differ in dtype.
        self.kernels = kernels
        # What an optimizer's step reads off tensors.
        self.values = ValuesInSteps()

    def create_symbolic_nested_int(self, **_: Any) -> Any:
        raise NeedsValues("a nested tensor")

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if (getattr(func, "is_view", False) or func is LIFT_OPERATION) and has_values(first):
            return run_with_values(func, args, kwargs)
        if func is READ_OPERATION and self.values.num_running:
            return self.values.answer(first.dtype)
        if func is NORM_BACKWARD and not first.is_contiguous():
            with self:
                contiguous = torch.empty(first.shape, dtype=first.dtype, device=first.device)
            args = (contiguous, *args[1:])
        if func is GROUPED_MM_OPERATION and first.dtype is not torch.bfloat16:
            return self._allocate_grouped(
                first, args[1], args[2] if len(args) > 2 else kwargs.get("offs")
            )
        _check_indices(func, args)
        out: Any = super().dispatch(func, types, args, kwargs)
        # Another subclass takes a call that fake tensors leave to it.
        if out is NotImplemented:
            return out
        if func in NORM_FORWARDS:
            return self._correct_norm(func, args, out)
        if func is BATCH_NORM_BACKWARD and out[0] is not None:
            return self._allocate_like(args[1], out[0].dtype), *out[1:]
        if func is GROUP_NORM_BACKWARD and out[0] is not None:
            like = args[1] if GROUP_NORM_KEEPS_LAYOUT else out[0]
            return self._allocate_like(like, args[1].dtype), *out[1:]
        if func in RESIZED_LOSSES and out.dim() == 0:
            return self._allocate_resized(torch.broadcast_shapes(first.shape, args[1].shape), out)
        return out

    def _allocate_resized(self, size: Sequence[int], out: Tensor) -> Tensor:
        """Allocate this many elements for a tensor that has fewer, as a kernel that resizes it."""
        with self:
            return torch.empty(size, dtype=out.dtype, device=out.device).resize_(out.shape)

    def _correct_norm(self, func: Any, args: Any, out: Any) -> Any:
        """Correct the layout of a norm's output and the dtype of its statistics."""
        output, *statistics = out
        if func is BATCH_NORM or (func is GROUP_NORM and GROUP_NORM_KEEPS_LAYOUT):
            output = self._allocate_like(args[0], output.dtype)
        given = [value for value in args[1:] if isinstance(value, Tensor)]
        float32 = any(value.dtype is torch.float32 for value in given)
        if self.kernels == "cuda" and func is not GROUP_NORM:
            float32 = args[0].dtype in HALF_PRECISION_DTYPES
        if float32 and statistics[0].dtype is not torch.float32:
            statistics = [self._allocate_like(value, torch.float32) for value in statistics]
        return output, *statistics

    def _allocate_like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of this shape: contiguous, or with channels last if they are so."""
        with self:
            return torch.empty_like(
                tensor, dtype=dtype, memory_format=suggest_memory_format(tensor)
            )

    def _allocate_grouped(self, a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
        """Allocate the output of a grouped matrix product, with aligned rows."""
        if a.dim() == 2 or b.dim() == 2:
            groups = [ends.shape[0]] if ends is not None and a.dim() == b.dim() == 2 else []
            size = [*groups, a.shape[-2], b.shape[-1]]
        else:
            size = [*a.shape[:2], b.shape[-1]]

        step = ROW_ALIGNMENT_BYTES // a.dtype.itemsize
        row = -(-size[-1] // step) * step
        strides = [size[1] * row, row, 1][-len(size) :]
        with self:
            return torch.empty_strided(size, strides, dtype=a.dtype, device=a.device)


def _check_indices(func: Any, args: Any) -> None:
    """Raise an error for an index out of range, as the real kernels do."""
    chosen: Iterable[tuple[int, Any]] = ()
    # A mask may stand for several dimensions.
    if func is INDEX and not any(getattr(one, "dtype", None) is torch.bool for one in args[1]):
        chosen = zip(args[0].shape, args[1], strict=False)
    elif func is INDEX_SELECT:
        chosen = zip(args[0].shape[args[1] :], args[2:3], strict=False)
    for size, index in chosen:
        if has_values(index) and index.dtype is torch.int64 and (index >= size).any():
            raise IndexError(f"index {int(index.max())} is out of range for {size} entries")


def has_values(value: Any) -> bool:
    """Check for a real tensor, such as token ids have inside of `pretended`."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


# Stand-ins on fake CPU tensors for CUDA's attention, RMS norm, dropout and autocast.

HALF_PRECISION_DTYPES = (torch.float16, torch.bfloat16)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Choose the attention kernel as CUDA does.

    Half precision without a mask runs flash attention where keys and values are equally wide; all
    else runs the memory-efficient kernel.
    """
    if torch.is_autocast_enabled("cpu"):
        # Autocast does not apply to the operations called below.
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (one.to(dtype) for one in (query, key, value))

    if query.dim() != 4:
        return _PLAIN_ATTENTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    is_half = query.dtype in HALF_PRECISION_DTYPES
    if is_half and attn_mask is None and value.shape[-1] == query.shape[-1] <= 256:
        output: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return output

    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), -torch.inf
            )
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])

    result: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return result


class _RmsNorm(torch.autograd.Function):
    """RMS norm that saves its input and one number per row, as CUDA's fused kernel does.

    The CPU's RMS norm saves the result of every operation that it consists of.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        rows = (*x.shape[: x.dim() - num_dims], *[1] * num_dims)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        statistic = x.new_empty(rows, dtype=dtype)
        ctx.save_for_backward(x, weight, statistic)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    output: Tensor = _RmsNorm.apply(input, weight, len(normalized_shape))
    return output


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keep a byte for each number, as CUDA's fused kernel does; the CPU keeps the scaled mask."""
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


_PLAIN_ATTENTION = F.scaled_dot_product_attention
STAND_INS: Mapping[Any, Callable[..., Any]] = {
    _PLAIN_ATTENTION: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
    torch.dropout: _dropout,
}
_FLOAT32_NAMES = (
    "layer_norm",
    "group_norm",
    "softmax",
    "log_softmax",
    "softplus",
    "cosine_similarity",
    "normalize",
    "exp",
    "log",
    "log1p",
    "pow",
    "rsqrt",
    "reciprocal",
    "sum",
    "prod",
    "cumsum",
    "cumprod",
    "norm",
    "logsumexp",
)
# Functions that autocast runs in float32 on CUDA, and in half precision on the CPU.
FLOAT32_FUNCTIONS = frozenset(
    getattr(space, name)
    for space in (torch, Tensor, F)
    for name in _FLOAT32_NAMES
    if hasattr(space, name)
) | {Tensor.__pow__}


# Functions that autocast runs in half precision on CUDA, and does not know on the CPU.
HALF_PRECISION_FUNCTIONS = frozenset(
    getattr(space, name)
    for space in (torch, Tensor, F, torch.linalg)
    for name in ("einsum", "mv", "addmv", "addr", "multi_dot", "chain_matmul", "prelu")
    if hasattr(space, name)
)


class HalfPrecisionCopies(dict[Tensor, Tensor]):
    """Convert operands as CUDA's autocast does: weights once, until autocast ends."""

    def convert(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self.convert, value))
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        dtype = torch.get_autocast_dtype("cpu")
        is_weight = value.requires_grad and value.is_leaf and not value._is_view()
        if not is_weight or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if value not in self:
            self[value] = value.to(dtype)
        return self[value]


def in_float32(value: Any) -> Any:
    """Convert tensors of half precision to float32."""
    return (
        value.float()
        if isinstance(value, Tensor) and value.dtype in HALF_PRECISION_DTYPES
        else value
    )


@contextlib.contextmanager
def as_on_cuda(copies: HalfPrecisionCopies) -> Iterator[None]:
    """Apply autocast for CUDA to CPU tensors."""
    original = torch.autocast.__init__
    clear_cache = torch.clear_autocast_cache

    def clear() -> None:
        clear_cache()
        copies.clear()

    def autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            dtype = dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, enabled, **kwargs)

    with (
        mock.patch.object(torch.autocast, "__init__", autocast),
        # The outermost context of autocast calls it at its end.
        mock.patch.object(torch, "clear_autocast_cache", clear),
    ):
        yield


# Fake models, whose tensors have shapes but no values, to count bytes without memory.


class NeedsValues(RuntimeError):
    """An operation needs values, or its memory does not follow from shapes."""

    def __init__(
        self, func: Any, why: str = "it needs values, which an estimate from shapes does not have"
    ) -> None:
        self.func = func
        self.why = why
        super().__init__(f"{func}: {why}")


def who_needs_values(error: BaseException) -> str:
    """Name the operation that needs values, and the module whose forward calls it."""
    owner = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name == "forward" and isinstance(module, nn.Module):
            owner = f" in the forward of {type(module).__name__}, {code.co_filename}:{line}"
    if is_subclass_refusal(error):
        return f"{error}: such a parameter is made from a tensor with values alone"
    func = getattr(error, "func", None) or "an operation"
    if isinstance(error, NeedsValues):
        return f"{func}{owner}: {error.why}"
    return f"{func}{owner} needs values, which an estimate from shapes does not have"


KERNEL_DEVICES = ("cpu", "cuda")
# Functions that make tensors of numbers, whose values are kept.
NUMBER_FACTORIES = (
    torch.arange,
    torch.linspace,
    torch.logspace,
    torch.randint,
    torch.randperm,
    torch.tensor,
    torch.as_tensor,
)
# The largest float32 below 1, and the smallest number that a uniform draw gives.
LARGEST_DRAW = 1 - 2**-24
SMALLEST_DRAW = 0.0
# Functions that make a tensor of one value, with that value.
UNIFORM_FACTORIES = {torch.ones: torch.ones(()), torch.zeros: torch.zeros(())}
# Methods that convert a tensor, with the dtype of the result if none is given.
CONVERSIONS = {
    Tensor.to: torch.float32,
    Tensor.bool: torch.bool,
    Tensor.long: torch.int64,
    Tensor.int: torch.int32,
}
# Python types that may be passed as dtype.
DTYPE_OF_PYTHON_TYPE: dict[Any, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float32,
}
NEEDS_VALUES_ERRORS = (
    NeedsValues,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def is_subclass_refusal(error: BaseException | None) -> bool:
    """Check for torch's refusal to make a tensor of another class out of one without values.

    Quantised parameters of bitsandbytes are made that way.
    """
    return isinstance(error, RuntimeError) and "Creating a new Tensor subclass" in str(error)


@contextlib.contextmanager
def pretended(
    *, mode: KernelsAsTheyRun | None = None, kernels: str = "cpu"
) -> Iterator[KernelsAsTheyRun]:
    """Make all new tensors fake, and map CUDA devices to the CPU.

    Only tensors of the same `mode` can be used together.
    """
    if kernels not in KERNEL_DEVICES:
        raise ValueError(f"kernels must be one of {KERNEL_DEVICES}, got {kernels!r}")
    if mode is None:
        mode = KernelsAsTheyRun(kernels=kernels)
    here = _Here(cuda=kernels == "cuda")
    nothing = contextlib.nullcontext()
    with (
        # torch logs every error that it raises for fake tensors; silence that.
        mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
        mock.patch.object(nn.Module, "_apply", _apply),
        # In torch 2.13 this redraws until all values are in range, which never ends without values.
        mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),
        _recomputes_in_modes(checkpoint, CHECKPOINT_GENERATOR),
        _recomputes_in_modes(checkpoint.CheckpointFunction, "apply"),
        mode,
        as_on_cuda(here.copies) if here.cuda else nothing,
        capturable_anywhere() if here.cuda else nothing,
        mode.values.during_steps(),
        here,
    ):
        yield mode


def _recomputes_in_modes(owner: Any, name: str) -> Any:
    """Patch a function of torch's checkpoint: the first argument runs in the modes of its forward.

    Torch recomputes in backward, where `_Here` and the user's function modes are not active.
    """
    original = getattr(owner, name)

    def patched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(in_modes(function, function_modes()), *args, **kwargs)

    return mock.patch.object(owner, name, patched)


def host_bytes(optimizer: SteppedOnHost) -> int:
    """Return the bytes that an optimizer keeps on the host to step there."""
    with pretended() if fake_mode() is None else contextlib.nullcontext():
        copies = [
            nn.Parameter(torch.empty(one.shape, dtype=one.dtype)) for one in optimizer.on_host()
        ]
        for copied in copies:
            copied.grad = torch.empty_like(copied)
        part = optimizer.make(copies)
        take_eagerly(part)
        kept = [copies, [copied.grad for copied in copies], *part.state.values()]
        return sum(one.nbytes for held in tensors_in(kept) for one in local_tensors(held))


def host_note(optimizer: torch.optim.Optimizer) -> str | None:
    """Describe what an optimizer keeps on the host; None if it steps on the device."""
    if not isinstance(optimizer, SteppedOnHost):
        return None
    return (
        f"its optimizer steps on the host, which holds {format_bytes(host_bytes(optimizer))}: a "
        f"copy, a gradient and the state of {len(optimizer.on_host())} parameters"
    )


class PretendedCase(Case):
    """A case with fake modules and batches, for use inside `pretended`; integers stay real."""

    def build(self) -> nn.Module:
        with seeded(self.seed):
            return self.place_module(_drop_real(self.workload.build())).train()

    def batch(self, size: int | None = None) -> Any:
        return map_tensors(
            super().batch(size),
            lambda tensor: _drop_values(tensor) if tensor.is_floating_point() else tensor,
        )


def _drop_real(module: nn.Module) -> nn.Module:
    """Return a copy with fake tensors if the factory used real weights; those stay unchanged."""
    tensors = [*module.parameters(), *module.buffers()]
    if all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return module
    replacements = {id(tensor): _drop_values(tensor) for tensor in tensors}
    return copy.deepcopy(module, replacements)


def _drop_values(tensor: Tensor) -> Tensor:
    """Return a fake tensor of the same shape, or the tensor itself if it is fake."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.is_nested:
        raise NeedsValues("a nested tensor")
    mode = fake_mode()
    assert mode is not None, "the modules of a pretended case are built inside of pretended"
    has_values = {not isinstance(one, FakeTensor) for one in local_tensors(tensor)}
    if len(has_values) > 1:
        return _drop_wrapped_values(tensor)
    fake_tensor: Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake_tensor


def _drop_wrapped_values(tensor: Any) -> Tensor:
    """Replace the tensors with values in a wrapper, such as the table of codes of NF4."""
    names, context = tensor.__tensor_flatten__()
    inside = {name: _drop_values(getattr(tensor, name)) for name in names}
    made: Tensor = type(tensor).__tensor_unflatten__(inside, context, tensor.shape, tensor.stride())
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made


def _apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Replace `Module._apply`, since torch 2.11 to 2.13 refuses to swap fake parameters."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            applied = function(parameter.data)
            if applied.is_meta:
                module._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
            else:
                parameter.data = applied
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
        self.copies = HalfPrecisionCopies()
        self._conversions = {
            **dict.fromkeys(HALF_PRECISION_FUNCTIONS, self.copies.convert),
            **dict.fromkeys(FLOAT32_FUNCTIONS, in_float32),
        }

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = tuple(map(_move_to_cpu, args))
        kwargs = {name: _move_to_cpu(value) for name, value in (kwargs or {}).items()}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"

        if function in IDENTITY_METHODS:
            return args[0]
        if function in FAKE_METHODS and any(
            isinstance(leaf, FakeTensor) for leaf in tree_iter(args)
        ):
            return FAKE_METHODS[function](*args, **kwargs)
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if function in CONVERSIONS and isinstance(args[0], FakeTensor):
            args = (_make_value(function, args, kwargs), *args[1:])
        if _has_values(function, args, kwargs):
            return run_with_values(function, args, kwargs)
        made = self._run(function, args, kwargs)
        if function in UNIFORM_FACTORIES and isinstance(made, FakeTensor):
            vars(made)["uniform_value"] = UNIFORM_FACTORIES[function], made._version
        return made

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.cuda:
            convert = self._conversions.get(function)
            if convert is not None and torch.is_autocast_enabled("cpu"):
                args = tuple(map(convert, args))
                kwargs = {name: convert(value) for name, value in kwargs.items()}
            function = STAND_INS.get(function, function)
        return function(*args, **kwargs)


def _make_value(function: Any, args: Any, kwargs: Any) -> Tensor:
    """Return a real tensor to convert in place of what `torch.ones` or `torch.zeros` made.

    A model makes its mask this way in float32, and the code that reads the mask as booleans skips
    it where nothing is masked. A tensor that was written to since is returned as it is.
    """
    tensor: Tensor = args[0]
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype))
    dtype = next(given, CONVERSIONS[function])
    value, version = vars(tensor).get("uniform_value", (None, None))
    if value is None or tensor._version != version or dtype.is_floating_point or dtype.is_complex:
        return tensor
    with unset_fake_temporarily():
        real: Tensor = value.expand(tensor.shape)
        return real


class EveryLayerRuns(TorchFunctionMode):
    """Fix every draw of a single uniform number, so that no layer is skipped at random.

    Models that drop layers compare such a number with a probability. With the same value for each
    draw, all layers run or none: `value` is the one with which most memory is used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = LARGEST_DRAW
        self.drawn = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        sizes = tree_iter(kwargs.get("size", args))
        if (
            function is not torch.rand
            or math.prod(size for size in sizes if isinstance(size, int)) != 1
        ):
            return function(*args, **kwargs)
        self.drawn = True
        kwargs = {name: _move_to_cpu(value) for name, value in kwargs.items()}
        with unset_fake_temporarily():
            return function(*args, **kwargs).fill_(self.value)


def run_with_values(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run a function on real tensors inside of `pretended`."""
    with unset_fake_temporarily():
        return function(*args, **kwargs)


def fake_mode() -> FakeTensorMode | None:
    """Return the mode that makes tensors without values, or None outside of it."""
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


def _has_values(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether to run a function on real tensors, as for positions, masks and token ids.

    A model's own code may read their values.
    """
    if args and isinstance(args[0], FakeTensor):
        return False
    if tensors := operands(args, kwargs):
        return not any(
            isinstance(local, FakeTensor) for tensor in tensors for local in local_tensors(tensor)
        )
    dtype = DTYPE_OF_PYTHON_TYPE.get(kwargs.get("dtype"), kwargs.get("dtype"))
    return function in NUMBER_FACTORIES or (
        dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    )


def _move_to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _copy_fake(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Deep-copy a fake tensor; torch would read its address and warn that it has none."""
    key = id(tensor)
    if key not in memo and not isinstance(tensor, FakeTensor):
        # It is asked here because the memo has tensors without values.
        with unset_fake_temporarily():
            memo[key] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if key not in memo:
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied)
        copied.requires_grad_(tensor.requires_grad)
        # Attributes that the model has set on its parameter.
        for name, value in vars(tensor).items():
            vars(copied).setdefault(name, copy.copy(value))
        memo[key] = copied
    result: Tensor = memo[key]
    return result


def _make_address(tensor: Tensor) -> int:
    """Return an address that is unique for each storage, for code that looks for shared ones."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize


def _refuse(func: str, *why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NeedsValues(func, *why)

    return refuse


# Methods that return the tensor itself.
IDENTITY_METHODS = {Tensor.cuda, Tensor.pin_memory}
# Replacements for methods of fake tensors.
FAKE_METHODS: Mapping[Any, Callable[..., Any]] = {
    Tensor.__deepcopy__: _copy_fake,
    Tensor.data_ptr: _make_address,
    Tensor.numpy: _refuse("Tensor.numpy"),
    Tensor.__array__: _refuse("numpy.array"),
    **{
        getattr(torch._VF, name): _refuse(
            name, "its kernel keeps a state whose size does not follow from shapes"
        )
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
