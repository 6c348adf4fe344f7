"""What an operation computes and how many bytes it reads and writes, from its arguments and its outcome.

Proof: `python -m pytest tests/test_operation_cost.py`.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.flops import operation_flops


def operation_cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """FLOPs and bytes read and written; a view costs nothing."""
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    _find(args, inputs)
    _find(kwargs, inputs)
    _find(out, outputs)
    mutable = getattr(getattr(func, "_schema", None), "is_mutable", False)
    there = {value.untyped_storage()._cdata for value in inputs.values()}
    if not mutable and all(value.untyped_storage()._cdata in there for value in outputs.values()):
        return 0, 0
    moved = sum(value.numel() * value.itemsize for value in (inputs | outputs).values())
    return operation_flops(func, args, kwargs, out), moved


def _find(value: Any, found: dict[int, Tensor]) -> None:
    """The tensors, and of a sparse one its two parts; operations take them in lists and tuples alone."""
    if isinstance(value, Tensor):
        for part in (
            (value._indices(), value._values()) if value.layout is torch.sparse_coo else (value,)
        ):
            found[id(part)] = part
    elif isinstance(value, list | tuple):
        for part in value:
            _find(part, found)
    elif isinstance(value, dict):
        for part in value.values():
            _find(part, found)
