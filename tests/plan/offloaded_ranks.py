"""Programs whose parameters FSDP2 offloads, for predicted ranks and for real processes."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from curry_train.core.blocks import find_blocks
from curry_train.plan.optimizers import make_optimizer
from curry_train.plan.rank_step import host_apart
from curry_train.plan.record import RankStorages, on_host
from curry_train.workloads.models import mlp
from curry_train.workloads.workload import Case
from ranks import peak_of_running_rank

BATCH_SIZE = 8


def small():
    return mlp(depth=3, width=64)


def offloaded(model, mesh, **options):
    """Shard the blocks, and have all parameters on the host."""
    options |= {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for block in find_blocks(model).values():
        fully_shard(block, **options)
    fully_shard(model, **options)


def in_bfloat16(model, mesh):
    offloaded(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


WAYS = {"float32": offloaded, "bfloat16": in_bfloat16}


def measure_offloaded(cases):
    """Measure the peaks of device and host in this rank, by way, window and memory."""
    return [measure(*case) for case in cases]


def measure(way, window, is_apart):
    """Measure a program; without `is_apart` the host is the device."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    host = on_host if is_apart else contextlib.nullcontext
    storages = RankStorages()
    held = {}

    def make():
        case = Case(small())
        with host():
            model = case.build()
            WAYS[way](model, mesh)
            optimizer = make_optimizer("adamw", model)
        if is_apart:
            # A script holds what its model has returned.
            model.register_forward_hook(lambda module, inputs, output: held.update(output=output))
        batch = case.batch(BATCH_SIZE)

        def step():
            storages.host_peak = storages.host_bytes
            for index in range(window):
                model.set_requires_gradient_sync(index == window - 1)
                case.workload.mean_loss(model, batch).backward()
            with host():
                optimizer.step()
            held.clear()
            optimizer.zero_grad()

        return step

    with host_apart() if is_apart else contextlib.nullcontext():
        peak = peak_of_running_rank(make, repeats=2, storages=storages)
    return peak, storages.host_peak
