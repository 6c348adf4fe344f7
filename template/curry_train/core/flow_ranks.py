"""Sums over the ranks among which a tensor or a batch is divided.

Proof: `python -m pytest tests/test_grad_flow_ranks.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def dense(tensor: Tensor) -> Tensor:
    """Return this rank's local part of a DTensor, or the tensor itself."""
    placed: Any = tensor
    return placed.to_local() if is_divided(tensor) else tensor


def is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def groups_of(tensor: Tensor) -> list[Any]:
    """Return the process groups among which a tensor is sharded; none if plain or replicated."""
    if not is_divided(tensor):
        return []
    placed: Any = tensor
    for placement in placed.placements:
        if placement.is_partial():
            raise ValueError(
                f"a gradient with placements {placed.placements} is a partial sum: reduce it first"
            )
    return [
        placed.device_mesh.get_group(index)
        for index, kind in enumerate(placed.placements)
        if kind.is_shard()
    ]


def add_over_ranks(sums: Tensor, groups: Sequence[Sequence[Any]]) -> None:
    """Sum each row over the groups of its tensor, with one all-reduce per group.

    Every rank has to call this.
    """
    distinct = {id(group): group for row_groups in groups for group in row_groups}
    for group_id, group in distinct.items():
        rows = [index for index, row_groups in enumerate(groups) if group_id in map(id, row_groups)]
        reduced = sums[rows]
        dist.all_reduce(reduced, group=group)
        sums[rows] = reduced


def group_of_batch(model: nn.Module) -> Any:
    """Return the process group among which the batch is divided, or None.

    That is DDP's group, or FSDP2's if its mesh has one dimension.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    fully_sharded = torch.distributed.fsdp.FSDPModule
    if not any(isinstance(module, fully_sharded) for module in model.modules()):
        return None
    divided: list[Any] = [parameter for parameter in model.parameters() if is_divided(parameter)]
    meshes = {parameter.device_mesh for parameter in divided}
    if len(meshes) != 1:
        return None
    mesh = meshes.pop()
    return mesh.get_group() if mesh.ndim == 1 else None


def inner_of(model: nn.Module) -> nn.Module:
    """Return the user's model inside DistributedDataParallel and `torch.compile` wrappers."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside
