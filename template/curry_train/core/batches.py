"""Nested batches of tensors, cut along the leading dimension.

Proof: `python -m pytest tests/test_workload.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to every tensor of a nested batch; return everything else unchanged."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def batch_size(batch: Any) -> int:
    """Return the leading dimension of the first tensor that has one."""
    sizes: list[int] = []
    map_tensors(batch, lambda tensor: sizes.append(tensor.shape[0]) if tensor.dim() else None)
    if not sizes:
        raise ValueError(
            "a batch must hold at least one tensor with a batch dimension, "
            f"got {type(batch).__name__}"
        )
    return sizes[0]


def take(batch: Any, rows: slice | list[int]) -> Any:
    """Select samples from a batch; tensors with another leading dimension are shared."""
    size = batch_size(batch)
    return map_tensors(
        batch, lambda tensor: tensor[rows] if tensor.dim() and tensor.shape[0] == size else tensor
    )
