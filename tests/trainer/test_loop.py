"""The training loop: schedule, evaluation, saving, hooks and stopping.

python -m pytest tests/trainer/test_loop.py
"""

import itertools

import pytest
import torch
from torch import nn
from torch.optim import SGD

from curry_train.loop import mean_loss, run_training_steps
from curry_train.primitives import GradientAccumulation, NonFiniteWindow
from curry_train.workloads import Case, load_workload

from ..rank_calls import run_on_ranks
from ..unchanged import unchanged

CASE = Case(load_workload("mlp"))


def parts(learning_rate=0.1):
    module = CASE.build()
    return module, SGD(module.parameters(), lr=learning_rate)


def batches(number=None):
    return itertools.islice(itertools.cycle(CASE.split(CASE.batch(8), [2] * 4)), number)


def run(module, optimizer, microbatches=None, **options):
    microbatches = batches() if microbatches is None else microbatches
    return run_training_steps(
        module, optimizer, microbatches, CASE.workload.loss, count=CASE.workload.count, **options
    )


def test_each_group_keeps_its_own_learning_rate_under_the_schedule():
    module, _ = parts()
    first, *rest = module.parameters()
    optimizer = SGD([{"params": [first], "lr": 1.0}, {"params": rest, "lr": 0.01}])
    report = run(module, optimizer, steps=2, schedule=lambda step: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.005]
    assert (report.step, report.ended_by, report.finished) == (2, "steps", True)


def test_the_end_of_the_data_ends_the_run():
    report = run(*parts(), batches(5), steps=9, accumulation=GradientAccumulation(2))
    assert (report.step, report.ended_by, report.finished) == (3, "data", False)


def test_a_loss_that_is_not_finite_names_the_step():
    data = CASE.split(CASE.batch(12), [2] * 6)
    data[4][0].fill_(float("nan"))
    message = r"step 3: window 2: .* not finite: microbatch 0 of 2"
    with pytest.raises(NonFiniteWindow, match=message):
        run(*parts(), data, steps=9, accumulation=GradientAccumulation(2))


def test_a_scaler_skips_an_overflow_and_the_run_continues():
    module, optimizer = parts(1e-6)
    scaler, reports = torch.amp.GradScaler("cpu", init_scale=2.0**127), []
    large = lambda module, batch: 1024 * CASE.workload.loss(module, batch)  # noqa: E731
    report = run_training_steps(
        module, optimizer, batches(), large, steps=30, scaler=scaler, after_step=[reports.append]
    )
    assert not reports[0].stepped
    assert report.last.stepped


def test_a_scaler_that_never_stops_skipping_ends_the_run():
    module, optimizer = parts()
    module[0][0].weight.register_hook(lambda gradient: gradient * float("nan"))
    done = []
    with pytest.raises(NonFiniteWindow, match=r"step 25: 25 steps in a row .* scale is now 2"):
        run(
            module,
            optimizer,
            steps=99,
            scaler=torch.amp.GradScaler("cpu", init_scale=2.0**26),
            after_step=[done.append] * 2,
        )
    assert len(done) == 2 * 24


def test_an_evaluation_without_its_function_is_refused():
    with pytest.raises(ValueError, match=r"^evaluate_every needs a function evaluate=$"):
        run(*parts(), steps=3, evaluate_every=2)


def test_a_loss_that_is_not_finite_on_one_rank_stops_both_with_the_same_weights():
    ended = run_on_ranks(f"{__file__}:poisoned_on_rank_1")
    assert ended[0] == ended[1]
    assert (ended[0]["step"], ended[0]["weights"]) == (2, ended[0]["before"])


def poisoned_on_rank_1():
    rank = torch.distributed.get_rank()
    module = nn.parallel.DistributedDataParallel(CASE.build())
    data = CASE.split(CASE.batch(8), [2] * 4)
    if rank == 1:
        data[2][0].fill_(float("inf"))
    done = []

    def weights(_=None):
        done.append(sum(p.double().sum().item() for p in module.parameters()))
        return done[-1]

    try:
        run(module, SGD(module.parameters(), lr=0.1), data, steps=4, after_step=[weights])
    except NonFiniteWindow:
        return {"step": len(done), "before": done[-1], "weights": weights()}
    return {"step": -1}


# The dev loss: every sample counts once, on any number of ranks.


RESNET = Case(load_workload("resnet"))


class Rows:
    def __init__(self, size=11):
        self.whole = RESNET.batch(size)

    def __len__(self):
        return len(self.whole[1])

    def batch(self, samples):
        return tuple(part[list(samples)] for part in self.whole)


def measure(module, samples=11, **options):
    return mean_loss(
        module,
        Rows(),
        RESNET.workload.loss,
        RESNET.workload.count,
        samples=samples,
        microbatch=2,
        **options,
    )


def test_every_sample_counts_once_and_microbatches_do_not_matter():
    module = RESNET.build().eval()
    with torch.no_grad():
        whole = RESNET.workload.mean_loss(module, Rows().whole).item()
    assert measure(module) == pytest.approx(whole, rel=1e-6)
    assert measure(module, samples=100) == measure(module)


def test_evaluation_leaves_the_model_and_generators_unchanged():
    """Evaluate without BatchNorm learning from dev samples or dropout moving generators."""
    module = RESNET.build().train()
    next(module.children()).eval()
    with unchanged(module):
        measure(module)


def test_ranks_share_samples_that_do_not_divide_evenly():
    alone = measure(RESNET.build())
    assert (
        run_on_ranks(f"{__file__}:measured_on_ranks") == [[pytest.approx(alone, rel=1e-6)] * 2] * 2
    )


def measured_on_ranks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, sharded = torch.distributed.get_rank(), RESNET.build()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    return [measure(module, rank=rank, ranks=2) for module in (RESNET.build(), sharded)]
