"""Ranks of a run: started by torchrun with DDP or FSDP2, or a single process.

    with start_ranks(parallel="fsdp2", device="auto") as (ranks, device):
        model = share(module, device, parallel="fsdp2", precision=torch.bfloat16)

A wrong launch is an error with the command to use.
Proof: `python -m pytest tests/trainer/test_distribute.py`.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from .core.blocks import NoBlocks, find_blocks
from .core.timing import find_device
from .runs.ranks import Ranks


class WrongLaunch(ValueError):
    """The started processes do not fit the configuration."""


@contextlib.contextmanager
def start_ranks(
    *, parallel: str = "none", device: str = "auto", ranks: int | None = None
) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the other ranks, if `parallel` uses several, and choose this rank's device.

    `ranks` is the required number of ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    place = find_device(device)
    _check_launch(parallel, size, ranks)
    if parallel == "none":
        yield Ranks(), place
        return
    local = int(os.environ["LOCAL_RANK"])
    if place.type == "cuda":
        if local >= torch.cuda.device_count():
            raise WrongLaunch(
                f"this machine has {torch.cuda.device_count()} GPUs and torchrun started local "
                f"rank {local}, but NCCL needs a GPU for each rank: use --nproc-per-node with at "
                "most that number, or device=cpu"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Ranks(), place
    finally:
        if joined:
            dist.destroy_process_group()


def share(
    module: nn.Module, device: torch.device, *, parallel: str, precision: torch.dtype
) -> nn.Module:
    """Wrap the module for training on several ranks.

    With FSDP2 weights are gathered in `precision` and gradients are reduced in float32.
    """
    if parallel == "none":
        return module
    if parallel == "ddp":
        return DistributedDataParallel(
            module, device_ids=[device] if device.type == "cuda" else None
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = precision != torch.float32
    policy = MixedPrecisionPolicy(precision, torch.float32) if half else MixedPrecisionPolicy()
    try:
        blocks = list(find_blocks(module).values())
    except NoBlocks:
        blocks = []  # then the whole model is one unit
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)  # in place
    return module


def _check_launch(parallel: str, size: int, ranks: int | None) -> None:
    launched = "RANK" in os.environ
    count = ranks or (size if size > 1 else 2)
    how = f"torchrun --nproc-per-node {count} train.py parallel={parallel}"
    if parallel == "none" and size > 1:
        raise WrongLaunch(
            f"{size} ranks were started and parallel is none, so each would train the same model "
            "by itself: add parallel=ddp or parallel=fsdp2, or start one process with python"
        )
    if parallel != "none" and not launched:
        raise WrongLaunch(
            f"parallel={parallel} needs ranks, and this is a single process: start it with {how}"
        )
    if ranks is not None and ranks != size:
        raise WrongLaunch(
            f"the configuration is for ranks={ranks} and {size} {'were' if size > 1 else 'was'} "
            f"started: use --nproc-per-node {ranks}, or set ranks={size} (batch_size counts the "
            "samples of all ranks together)"
        )


def leave(status: int) -> NoReturn:
    """Exit the process; with several ranks at once, without Python's clean-up.

    On gloo, torch 2.13 aborts in about one of four exits of a process that used DDP.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
