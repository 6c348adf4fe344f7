"""Refuse ranks that are started wrongly, and wrap the model that they share.

Run with `python -m pytest tests/trainer/test_start_ranks.py`.
"""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from curry_train.core.timing import NoSuchDevice
from curry_train.runs.ranks import Ranks
from curry_train.trainer import WrongLaunch, share, start_ranks
from curry_train.workloads import Case, load_workload

from ..rank_calls import run_on_ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parallel": "none"},
            r"2 ranks were started and parallel is none, .*: add parallel=ddp or parallel=fsdp2",
        ),
        (
            {"parallel": "ddp", "ranks": 4},
            "for ranks=4 and 2 were started: use --nproc-per-node 4, or set ranks=2",
        ),
    ],
)
def test_a_wrong_launch_gets_the_right_command(monkeypatch, options, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(WrongLaunch, match=message), start_ranks(device="cpu", **options):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_is_refused_before_the_group_is_joined(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with (
        pytest.raises(NoSuchDevice, match="no CUDA device"),
        start_ranks(parallel="ddp", device="cuda"),
    ):
        pass
    assert not torch.distributed.is_initialized()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    """Refuse at once, where NCCL would hang or report duplicates."""
    monkeypatch.setattr("curry_train.trainer.find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(WrongLaunch, match=r"has 1 GPUs and torchrun started local rank 1"),
        start_ranks(parallel="ddp"),
    ):
        pass


def test_blocks_are_sharded_one_by_one_and_ranks_start_with_equal_weights():
    found = run_on_ranks(f"{__file__}:shared_by_two")
    assert (
        found
        == [
            {
                "ddp": True,
                "shards": ["", "layers.0", "layers.1", "layers.2", "layers.3"],
                "agreed": [0, 0],
            }
        ]
        * 2
    )


def shared_by_two():
    ranks = Ranks()
    device = torch.device("cpu")
    build = Case(load_workload("transformer")).build
    ddp = share(build(), device, parallel="ddp", precision=torch.float32)
    sharded = share(build(), device, parallel="fsdp2", precision=torch.bfloat16)
    shards = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
    agreed = ranks.agree(lambda: [ranks.rank, ranks.rank])
    return {"ddp": isinstance(ddp, DistributedDataParallel), "shards": shards, "agreed": agreed}
