"""Symptoms of the skill `memory-plan` on several GPUs, reproduced and cured.

python -m pytest tests/skills/test_symptoms_memory_plan_ranks.py
"""

import torch
from symptoms import symptom
from torch import nn

from curry_train.plan.estimate import Sketch
from curry_train.plan.parallel import Sharding
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
