"""The dev loss: every sample counts once, on any number of ranks.

Run with `python -m pytest tests/trainer/test_evaluation.py`.
"""

import pytest
import torch

from curry_train.loop import mean_loss
from curry_train.workloads import Case, load_workload

from ..rank_calls import run_on_ranks
from ..unchanged import unchanged

CASE = Case(load_workload("resnet"))


class Rows:
    def __init__(self, size=11):
        self.whole = CASE.batch(size)

    def __len__(self):
        return len(self.whole[1])

    def batch(self, samples):
        return tuple(part[list(samples)] for part in self.whole)


def measure(module, samples=11, **options):
    return mean_loss(
        module,
        Rows(),
        CASE.workload.loss,
        CASE.workload.count,
        samples=samples,
        microbatch=2,
        **options,
    )


def test_every_sample_counts_once_and_microbatches_do_not_matter():
    module = CASE.build().eval()
    with torch.no_grad():
        whole = CASE.workload.mean_loss(module, Rows().whole).item()
    assert measure(module) == pytest.approx(whole, rel=1e-6)
    assert measure(module, samples=100) == measure(module)


def test_evaluation_leaves_the_model_and_generators_unchanged():
    """Evaluate without BatchNorm learning from dev samples or dropout moving generators."""
    module = CASE.build().train()
    next(module.children()).eval()
    with unchanged(module):
        measure(module)


def test_ranks_share_samples_that_do_not_divide_evenly():
    alone = measure(CASE.build())
    assert (
        run_on_ranks(f"{__file__}:measured_on_ranks") == [[pytest.approx(alone, rel=1e-6)] * 2] * 2
    )


def measured_on_ranks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, sharded = torch.distributed.get_rank(), CASE.build()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    return [measure(module, rank=rank, ranks=2) for module in (CASE.build(), sharded)]
