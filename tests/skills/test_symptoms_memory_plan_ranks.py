"""Symptoms of the skill `memory-plan` on several GPUs, reproduced and cured.

python -m pytest tests/skills/test_symptoms_memory_plan_ranks.py
"""

import functools

import torch
from symptoms import symptom
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from curry_train.plan.estimate import Sketch
from curry_train.plan.parallel import Sharding
from curry_train.plan.pipeline import pipeline_peaks
from curry_train.workloads.models import mlp
from curry_train.workloads.workload import default_workload

NUM_RANKS = 8


def peak_of(workload, size=1, *, accumulated=False, rank=0, **options):
    sharding = Sharding("fsdp2", NUM_RANKS, rank=rank, **options)
    with Sketch(workload, sharding=sharding) as sketch:
        return sketch.step(size, accumulated=accumulated).peak_bytes


def classifier(classes):
    def build():
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes))

    return default_workload("classifier", build, (build(), torch.randn(4, 64)))


@symptom("out of memory on one rank alone, under FSDP2")
def test_the_first_ranks_have_more_where_a_dimension_cannot_be_shared_evenly():
    uneven = classifier(8 * NUM_RANKS + 1)
    more = peak_of(uneven, rank=0) - peak_of(uneven, rank=NUM_RANKS - 1)
    assert more > 0
    padded = classifier(16 * NUM_RANKS)
    assert peak_of(padded, rank=0) == peak_of(padded, rank=NUM_RANKS - 1)
    # The wrong fix: what the rank has more is no part of the batch.
    assert peak_of(uneven, 4, rank=0) - peak_of(uneven, 4, rank=NUM_RANKS - 1) == more


@symptom("out of memory only with accumulation, under FSDP2")
def test_gradients_stay_whole_until_the_last_microbatch_unless_each_one_syncs():
    model = mlp(depth=3, width=256)
    whole = sum(parameter.nbytes for parameter in model.build().parameters())
    alone = peak_of(model, 2)
    window = peak_of(model, 2, accumulated=True)
    synced = peak_of(model, 2, accumulated=True, sync_each_microbatch=True)
    assert window - alone > 0.4 * whole
    assert synced - alone < 0.2 * whole
    # The wrong fix: smaller microbatches, and more of them.
    assert peak_of(model, 1, accumulated=True) > synced


@symptom("out of memory only in `optimizer.step()`, from the first one on")
def test_adamw_makes_its_state_in_the_first_step_and_copies_in_each_one():
    def peak(optimizer, size=2):
        with Sketch(mlp(depth=3, width=256), kernels="cuda", optimizer=optimizer) as sketch:
            return sketch.step(size).timeline.peak

    foreach = peak("adamw")
    assert foreach.phase == "step"
    fused = peak(lambda module: torch.optim.AdamW(module.parameters(), fused=True))
    assert fused.bytes_alive < 0.9 * foreach.bytes_alive
    # The wrong fix: a smaller batch.
    assert peak("adamw", 1).bytes_alive > 0.99 * foreach.bytes_alive


class Stage(nn.Module):
    """Layers of a pipeline, and the head in the last stage."""

    def __init__(self, depth, classes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.head = nn.Linear(64, classes) if classes else None

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.head is None else self.head(x)


def pipeline(model, mesh, *, depths, microbatches):
    place, count = mesh.get_local_rank(), mesh.size()
    is_last = place == count - 1
    part = Stage(depths[place], 512 if is_last else 0)
    stage = PipelineStage(part, place, count, torch.device("cpu"), group=mesh.get_group())
    schedule = Schedule1F1B(stage, microbatches, loss_fn=lambda out, rows: out.square().mean())

    def step(rows):
        schedule.step(
            *([rows] if place == 0 else []), **({"target": rows, "losses": []} if is_last else {})
        )

    return part, step


@symptom("out of memory only at the last stage of a pipeline")
def test_the_last_stage_has_the_head_and_its_outputs_so_it_gets_fewer_layers():
    def peaks(*depths, microbatches=4):
        split = functools.partial(pipeline, depths=depths, microbatches=microbatches)
        workload = default_workload("rows", nn.Identity, (nn.Identity(), torch.randn(64, 64)))
        return pipeline_peaks(workload, split, mesh={"pp": 2}, batch_size=64)

    equal = peaks(4, 4)
    assert equal.heaviest is equal.last
    moved = peaks(6, 2)
    assert moved.heaviest.peak_bytes < equal.heaviest.peak_bytes
    # The wrong fix: fewer microbatches make the outputs of one larger.
    assert peaks(4, 4, microbatches=2).last.peak_bytes > equal.last.peak_bytes
