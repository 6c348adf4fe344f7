"""Cost of an operation: its FLOPs, and the bytes it reads and writes.

Proof: `python -m pytest tests/test_operation_cost.py`.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.flops import operation_flops


def operation_cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Return the FLOPs and the bytes read and written; both are 0 for a view."""
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    _find(args, inputs)
    _find(kwargs, inputs)
    _find(out, outputs)
    mutable = getattr(getattr(func, "_schema", None), "is_mutable", False)
    storages = {value.untyped_storage()._cdata for value in inputs.values()}
    if not mutable and all(
        value.untyped_storage()._cdata in storages for value in outputs.values()
    ):
        return 0, 0
    moved = sum(value.numel() * value.itemsize for value in (inputs | outputs).values())
    return operation_flops(func, args, kwargs, out), moved


def _find(value: Any, found: dict[int, Tensor]) -> None:
    """Collect the tensors in nested lists, tuples and dicts; of a sparse one indices and values."""
    if isinstance(value, Tensor):
        if value.layout is torch.sparse_coo:
            tensors = [value._indices(), value._values()]
        else:
            tensors = [value]
        for tensor in tensors:
            found[id(tensor)] = tensor
    elif isinstance(value, list | tuple):
        for item in value:
            _find(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _find(item, found)
