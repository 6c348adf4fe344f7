"""Behaviours on two ranks: DDP with a static graph or unused weights, and FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curry_train.gates.two_ranks import GradientSyncs

from .peer_table import (
    BEHAVIOURS,
    LEVERS,
    Block,
    Chain,
    X,
    behaviour,
    error_of,
    loss_of,
    same,
    torch_checkpoints,
)


class Unused(Block):
    def add(self):
        self.spare = nn.Linear(8, 8)


def two_steps(plain, model):
    """Train on the rank's rows, and return the collectives and gradients of each step."""
    rows = X[dist.get_rank() :: 2]
    found = []
    for _ in range(2):
        model.zero_grad()
        with GradientSyncs() as counted:
            loss_of(model(rows)).backward()
        found += [counted.num_calls, [whole(weight.grad) for weight in plain.parameters()]]
    return found


def whole(gradient):
    if gradient is None:
        return None
    tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return tensor.clone()


def require_same_on_ranks(change, wrap, block=Block):
    found = []
    for act in (lambda model: None, change):
        model = Chain(block)
        act(model)
        found.append(two_steps(model, wrap(model)))
    assert same(*found), "the results differ"


@behaviour("DDP with a static graph", on_ranks=True)
def ddp_static(change):
    require_same_on_ranks(
        change, lambda model: DistributedDataParallel(model, static_graph=True), Unused
    )


@behaviour("DDP that looks for unused weights", on_ranks=True)
def ddp_unused(change):
    require_same_on_ranks(
        change, lambda model: DistributedDataParallel(model, find_unused_parameters=True), Unused
    )


def shard_layers(model):
    """Shard each layer of a model that has some, and the rest of the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@behaviour("FSDP2 that shards each block", on_ranks=True)
def fsdp2(change):
    require_same_on_ranks(change, shard_layers)


def errors_on_ranks():
    """Return the error of each behaviour under each lever, which is None where it holds."""
    torch.manual_seed(0)
    levers = {**LEVERS, "torch": torch_checkpoints}
    return {
        one.name: {lever: repr(error_of(one, change)) for lever, change in levers.items()}
        for one in BEHAVIOURS
        if one.on_ranks
    }
