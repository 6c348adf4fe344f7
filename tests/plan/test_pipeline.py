"""Peaks of the stages of pipelines equal those of real processes.

python -m pytest tests/plan/test_pipeline.py
"""

from dataclasses import replace
from pathlib import Path

import pipelines
import pytest
import torch
from pipelines import PIPELINES, predict_pipeline, small
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from curry_train.gates.two_ranks import run_on_ranks
from curry_train.plan import rank_time
from curry_train.plan.cuda_step import CONTEXT_BYTES, cuda_memory, workspace_of
from curry_train.plan.device import PROFILES
from curry_train.plan.estimate import Sketch
from curry_train.plan.pipeline import (
    PipelinePeaks,
    StageBoard,
    StagePeak,
    first_ranks,
    pipeline_peaks,
    samples_of_pipeline,
)
from curry_train.plan.rank_time import Links, Message, StageCourse, StepCourse, time_of_pipeline
from curry_train.primitives import recompute_blocks
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import default_workload


def real_peaks(names, world):
    target = f"{Path(pipelines.__file__).resolve()}:measure_pipelines"
    return run_on_ranks(target, num_ranks=world, names=names)


def compare(names, world):
    real = real_peaks(names, world)
    for name in names:
        found = predict_pipeline(name, world)
        assert [one.peak_bytes for one in found.ranks] == [rank[name] for rank in real]
        yield found


def test_each_stage_of_an_interleaved_schedule_peaks_as_a_real_process_does():
    (found,) = compare(["interleaved"], 2)
    assert [one.stages for one in found.ranks] == [(0, 2), (1, 3)]
    assert (found.first.rank, found.last.rank) == (0, 1)
    model = small().build()
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(one.parameter_bytes for one in found.ranks) == held


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_stages_of_each_schedule_peak_as_real_processes_do(world):
    names = [name for name in PIPELINES if name != "interleaved" or world == 2]
    found = dict(zip(names, compare(names, world), strict=True))
    # GPipe holds the activations of all microbatches, 1F1B those of as many as stages follow.
    for stages in zip(found["1f1b"].ranks, found["gpipe"].ranks, strict=True):
        assert stages[0].peak_bytes < stages[1].peak_bytes
    least = found["1f1b, recompute"].first.peak_bytes
    assert least < found["1f1b"].first.peak_bytes


def test_shapes_that_were_assumed_of_a_stage_are_compared_when_it_runs():
    board = StageBoard(outputs={0: "four rows"})
    assert board.output_of(1, rank=0) == "four rows"
    assert board.is_wrong(0)
    board.outputs[1] = "four rows"
    assert not board.is_wrong(0)
    board.outputs[1] = "two rows"
    assert board.is_wrong(0)
    assert not board.is_wrong(1)


def test_the_table_names_the_first_last_and_heaviest_rank():
    ranks = (StagePeak(0, (0,), 4, 2048), StagePeak(2, (1,), 4, 4096), StagePeak(4, (2,), 4, 1024))
    found = PipelinePeaks("decoder", 8, {"pp": 3, "dp": 2}, ranks)
    lines = found.table(3072).splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = [line.split("B  ")[-1] for line in lines if line.startswith("    ")]
    assert rows == ["first", "heaviest", "last"]
    assert "-1.00 KiB" in next(line for line in lines if "heaviest" in line and "4.00" in line)
    assert found.to_json()["heaviest"] == 2


def test_a_pipeline_of_one_stage_reserves_what_a_plan_of_its_model_does():
    workload = transformer(depth=3, dim=256, vocabulary=4096, length=256)

    def alone(model, mesh):
        recompute_blocks(model)
        held = {}
        model.register_forward_hook(lambda module, inputs, output: held.update(logits=output))

        def step(batch):
            held["loss"] = workload.mean_loss(model, batch)
            held["loss"].backward()

        return model, step

    found = pipeline_peaks(workload, alone, mesh={"pp": 1}, batch_size=4, device="h100")
    with Sketch(workload, kernels="cuda") as sketch:
        step = sketch.step(4, change=recompute_blocks)
    memory = cuda_memory(step.trace, workspace_bytes=workspace_of("h100"))
    (rank,) = found.ranks
    assert (rank.peak_bytes, rank.reserved_bytes) == (step.peak_bytes, memory.reserved_bytes)
    assert found.most_bytes == memory.reserved_bytes + CONTEXT_BYTES
    # A budget of all of the card is what CUDA gives of it.
    assert found.limit(80 * 2**30) == PROFILES["h100"].usable_bytes < 80 * 2**30
    assert all(len(line) <= 80 for line in found.table(2**30).splitlines())


class Same(nn.Module):
    """A stage that computes as much as all others: gradients reach its first layer too."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))

    def forward(self, x):
        return self.layers(x + self.bias)


def uniform(kind, *, each=1):
    """Make a pipeline of equal stages, whose schedule has 8 microbatches."""

    def pipeline(model, mesh):
        place, count = mesh.get_local_rank(), each * mesh.size()
        numbers = range(place, count, mesh.size())
        parts = nn.ModuleList(Same() for _ in numbers)
        stages = [
            PipelineStage(part, number, count, torch.device("cpu"), group=mesh.get_group())
            for part, number in zip(parts, numbers, strict=True)
        ]
        schedule = kind(
            stages if each > 1 else stages[0], 8, loss_fn=lambda rows, target: rows.mean()
        )

        def step(rows):
            is_last = place == mesh.size() - 1
            ends = {"target": rows, "losses": []} if is_last else {}
            schedule.step(*([rows] if place == 0 else []), **ends)

        return parts, step

    return pipeline


# Only products of matrices take time, and messages none.
PRODUCTS = replace(
    PROFILES["cpu"],
    flops_per_second={"float32": 1e9},
    bytes_per_second=1e30,
    dispatch_seconds=1e-30,
)


@pytest.mark.parametrize(
    ("kind", "each", "ranks"),
    [(Schedule1F1B, 1, 3), (ScheduleGPipe, 1, 2), (ScheduleInterleaved1F1B, 2, 2)],
)
def test_the_bubble_of_each_schedule_is_that_of_its_formula(kind, each, ranks, monkeypatch):
    monkeypatch.setattr(rank_time, "COLLECTIVE_SECONDS", 0.0)
    rows = default_workload("rows", nn.Identity, (nn.Identity(), torch.randn(64, 64)))
    options = {"mesh": {"pp": ranks}, "batch_size": 64, "device": PRODUCTS}
    split = uniform(kind, each=each)
    seconds = pipeline_peaks(rows, split, links=Links(1e30, 1e30), **options).seconds
    assert [*seconds.compute.values()] == pytest.approx([seconds.compute[0]] * ranks, rel=1e-9)
    assert seconds.bubble == pytest.approx((ranks - 1) / (each * 8 + ranks - 1), rel=1e-9)


def stage(*messages):
    """Make a rank of one operation, with 1 second of work, before and after its messages."""
    course = StepCourse(
        flops=torch.tensor([1e9, 1e9]).numpy(), moved=torch.ones(2).numpy(), streams=[0, 0]
    )
    return StageCourse(course, messages, fixed=0, gradients=0)


def test_a_message_passes_when_both_ranks_have_called_and_a_missing_one_is_an_error():
    receive = (Message(0, "recv", 0, 0, 10**9), Message(0, None, 0))
    send = (Message(1, "send", 0, 1, 10**9), Message(2, None, 0))
    links = Links(1e9, 1e9)
    found = time_of_pipeline(
        {0: stage(*send), 1: stage(*receive)}, PRODUCTS, links, dtype="float32"
    )
    # A second of work, a second for the message, and two seconds of work of the receiver.
    assert found.schedule == pytest.approx(4, abs=1e-3)
    assert found.bubble == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(ValueError, match="the ranks 1 of the pipeline wait for messages"):
        time_of_pipeline({0: stage(), 1: stage(*receive)}, PRODUCTS, links, dtype="float32")


def test_a_rank_at_each_place_counts_and_the_global_batch_is_shared_by_pipelines():
    assert first_ranks({"pp": 2, "dp": 4}) == [0, 4]
    assert first_ranks({"dp": 4, "pp": 2}) == [0, 1]
    assert samples_of_pipeline({"pp": 2, "dp": 4}, 16) == 4
    with pytest.raises(ValueError, match="a global batch of 6 can't be shared by 4 ranks"):
        samples_of_pipeline({"pp": 2, "dp": 4}, 6)


def test_a_pipeline_without_stages_or_a_mesh_for_them_is_refused():
    def not_a_pair(model, mesh):
        return nn.Linear(2, 2)

    with pytest.raises(ValueError, match="the pipeline returned Linear: return the modules"):
        pipeline_peaks(small(), not_a_pair, mesh={"pp": 2}, batch_size=4)
    with pytest.raises(ValueError, match="has a dimension pp in its mesh"):
        pipeline_peaks(small(), not_a_pair, mesh={"dp": 2}, batch_size=4)
