"""FLOPs of one call of an operation: what torch has formulas for, attention, and products of groups.

Proof: `python -m pytest tests/test_measure.py -k flops`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def _packets(*names: str) -> set[Any]:
    return {getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)}


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
ATTENTION = _packets(*(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS))
ATTENTION_BACKWARD = _packets(*(f"_scaled_dot_product_{kernel}_backward" for kernel in _KERNELS))
GROUPED = _packets("_grouped_mm")  # the experts of a layer that routes


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call of an operation, 0 where torch has no formula."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in ATTENTION:
        return _attention_flops(*args[:3], products=2)
    if packet in ATTENTION_BACKWARD:
        return _attention_flops(*args[1:4], products=5)
    if packet in GROUPED:
        return _grouped_flops(args[0], args[1])
    return (
        int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0
    )


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, products: int) -> int:
    """Scores and their product with the values; backward does the scores again and four products more. The parts that
    a causal mask leaves out count as if they were computed, as torch has it."""
    batch, heads, length, width = query.shape
    mean_width = (width + value.shape[-1]) / 2
    return round(products * 2 * batch * heads * length * key.shape[-2] * mean_width)


def _grouped_flops(a: Tensor, b: Tensor) -> int:
    """Where one of the two has no dimension for the groups, they share its rows, its columns or what is summed over."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]
