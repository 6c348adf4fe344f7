"""Sums over the ranks that hold the other parts of a tensor, or of a batch.

Proof: `python -m pytest tests/test_grad_flow_ranks.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def dense(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided among ranks, or the tensor."""
    placed: Any = tensor
    return placed.to_local() if is_divided(tensor) else tensor


def is_divided(tensor: Tensor) -> bool:
    """Whether it is a DTensor; asking for its class would import distributed tensors for everyone."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def groups_of(tensor: Tensor) -> list[Any]:
    """The groups of ranks that hold the other parts of a tensor: none for a plain one, and for what is replicated."""
    if not is_divided(tensor):
        return []
    placed: Any = tensor
    for placement in placed.placements:
        if placement.is_partial():
            raise ValueError(
                f"a gradient of placements {placed.placements} is a part of a sum: reduce it first"
            )
    return [
        placed.device_mesh.get_group(index)
        for index, kind in enumerate(placed.placements)
        if kind.is_shard()
    ]


def add_over_ranks(sums: Tensor, groups: Sequence[Sequence[Any]]) -> None:
    """Add up each row over the groups of its tensor, one message for each group; every rank has to call this."""
    for group in {id(group): group for row in groups for group in row}.values():
        rows = [index for index, row in enumerate(groups) if any(other is group for other in row)]
        part = sums[rows]
        dist.all_reduce(part, group=group)
        sums[rows] = part


def group_of_batch(model: nn.Module) -> Any:
    """The ranks that have other parts of the batch: DDP's, or FSDP2's where its mesh has one dimension; else None."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    fully_sharded = torch.distributed.fsdp.FSDPModule
    if not any(isinstance(module, fully_sharded) for module in model.modules()):
        return None
    meshes: Any = {
        parameter.device_mesh for parameter in model.parameters() if is_divided(parameter)
    }  # type: ignore[attr-defined]
    return meshes.pop().get_group() if len(meshes) == 1 and next(iter(meshes)).ndim == 1 else None


def inner_of(model: nn.Module) -> nn.Module:
    """The user's model in DistributedDataParallel or in what `torch.compile` returned."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside
