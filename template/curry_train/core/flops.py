"""FLOPs of single operations: torch's formulas, attention and grouped matrix products.

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
# Grouped matrix product, which mixture-of-experts layers use.
GROUPED = _packets("_grouped_mm")


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of one call of an operation, 0 if there is no formula for it."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in ATTENTION:
        return _attention_flops(*args[:3], products=2)
    if packet in ATTENTION_BACKWARD:
        return _attention_flops(*args[1:4], products=5)
    if packet in GROUPED:
        return _grouped_flops(args[0], args[1])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, products: int) -> int:
    """Return the FLOPs of attention with the given number of matrix products.

    Forward has two products, scores and output; backward repeats the scores and has four more. As
    in torch's formulas, what a causal mask excludes is counted too.
    """
    batch, heads, length, width = query.shape
    mean_width = (width + value.shape[-1]) / 2
    return round(products * 2 * batch * heads * length * key.shape[-2] * mean_width)


def _grouped_flops(a: Tensor, b: Tensor) -> int:
    """Return the FLOPs of a grouped matrix product.

    Groups share the rows, the columns or the summed dimension of an operand that has no dimension
    for them.
    """
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]
