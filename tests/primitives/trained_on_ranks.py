"""Train with and without a technique on this rank, under DDP and under FSDP2."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curry_train.gates.two_ranks import GradientSyncs
from curry_train.workloads import load_workload
from curry_train.workloads.workload import Case

Technique = Callable[[nn.Module], Any]


def compare_on_ranks(
    name: str, *techniques: Technique, report: Callable[[nn.Module], Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Compare the second step of a built-in model with each technique to the plain one.

    Returns for `ddp` and `fsdp2` the collectives of each step, the plain one first, the largest
    difference of its gradients for each technique, and what `report` gives for its model.
    """
    case = Case(load_workload(name))
    batch = case.split(case.batch(4), [2, 2])[dist.get_rank()]
    found = {}
    for kind in ("ddp", "fsdp2"):
        syncs = []
        gradients = []
        reports = []
        for technique in (_nothing, *techniques):
            model = case.build()
            technique(model)
            wrapped = _wrapped(model, kind)
            for _ in range(2):
                wrapped.zero_grad()
                with GradientSyncs() as counted:
                    case.workload.mean_loss(wrapped, batch).backward()
            syncs.append(counted.num_calls)
            gradients.append(list(_gradients(wrapped)))
            if report is not None and technique is not _nothing:
                reports.append(report(model))
        plain, *others = gradients
        differences = [_largest_difference(plain, other) for other in others]
        found[kind] = {"syncs": syncs, "differences": differences, "reports": reports}
    return found


def _nothing(model: nn.Module) -> None:
    """Apply no technique."""


def _wrapped(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        yield gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _largest_difference(gradients: list[Tensor], others: list[Tensor]) -> float:
    pairs = zip(gradients, others, strict=True)
    return max((gradient - other).abs().max().item() for gradient, other in pairs)
