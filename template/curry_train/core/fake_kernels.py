"""Corrections of fake tensor kernels that differ from the real ones.

    with KernelsAsTheyRun(allow_non_fake_inputs=True):
        ...

The differences are those of torch 2.11 and 2.13. Each correction has a test that fails when it is
no longer needed.

Proof: `python -m pytest tests/test_fake_kernels.py`.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
LIFT = torch.ops.aten.lift_fresh.default
GROUPED = torch.ops.aten._grouped_mm.default
# Alignment in bytes of the rows of a grouped matrix product.
ALIGNED = 16


class KernelsAsTheyRun(FakeTensorMode):
    """Fake tensor mode with outputs like those of the real kernels.

    Views of real tensors stay real, the backward of layer norm returns contiguous tensors, and
    grouped matrix products accept the kernel's dtypes, which on the CPU are more than bfloat16.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and (getattr(func, "is_view", False) or func is LIFT) and _has_values(args[0]):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is NORM_BACKWARD and not args[0].is_contiguous():
            with self:
                contiguous = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
            args = (contiguous, *args[1:])
        if func is GROUPED and args[0].dtype is not torch.bfloat16:
            return self._grouped(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
        return super().dispatch(func, types, args, kwargs)

    def _grouped(self, a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
        """Allocate the output of a grouped matrix product, with aligned rows."""
        if a.dim() == 2 or b.dim() == 2:
            groups = [ends.shape[0]] if ends is not None and a.dim() == b.dim() == 2 else []
            size = [*groups, a.shape[-2], b.shape[-1]]
        else:
            size = [*a.shape[:2], b.shape[-1]]

        step = ALIGNED // a.dtype.itemsize
        row = -(-size[-1] // step) * step
        strides = [size[1] * row, row, 1][-len(size) :]
        with self:
            return torch.empty_strided(size, strides, dtype=a.dtype, device=a.device)


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)
