"""The fewest GPUs on which a training fits, against a search of all numbers of GPUs.

python -m pytest tests/plan/test_fewest.py
"""

import itertools
from dataclasses import replace

import pytest

from curry_train.plan import Sharding, Sketch, find_profile
from curry_train.plan.cuda_step import CONTEXT_BYTES, cuda_memory, workspace_of
from curry_train.plan.fewest import CHANGES, fewest_gpus, floor_of
from curry_train.primitives import apply_chunked_loss, recompute_blocks
from curry_train.workloads.models import mlp, transformer

from ..command_runs import flat, require_narrow

MIB = 2**20
BATCH = 2
MODEL = mlp(depth=3, width=4096)


def card(num_bytes):
    return replace(find_profile("h100"), usable_bytes=num_bytes)


@pytest.fixture(scope="module")
def least_peaks():
    """Run every change on each number of GPUs, and get the least peaks.

    The model has no output layer, so that its loss has no chunks.
    """
    peaks = {}
    for count in (1, 2):
        with Sketch(MODEL, kernels="cuda", sharding=Sharding("fsdp2", count)) as sketch:
            for microbatch, change in itertools.product(
                (1, BATCH // count), (None, recompute_blocks)
            ):
                several = microbatch < BATCH // count
                step = sketch.step(microbatch, accumulated=several, change=change)
                memory = cuda_memory(step.trace, workspace_bytes=workspace_of("h100"))
                peak = max(step.peak_bytes, memory.reserved_bytes) + CONTEXT_BYTES
                peaks[count] = min(peak, peaks.get(count, peak))
    return peaks


def test_the_fewest_gpus_are_those_of_a_search_through_all_numbers_and_changes(least_peaks):
    assert least_peaks[1] > least_peaks[2]
    found = fewest_gpus(MODEL, card(least_peaks[2]), global_batch=BATCH)
    assert found.best.num_gpus == 2
    assert found.best.margin_bytes == 0
    alone = next(one for one in found.attempts if one.num_gpus == 1)
    assert alone.margin_bytes == least_peaks[2] - least_peaks[1] < 0
    assert not alone.is_hopeless
    table = found.table()
    require_narrow(table)
    assert "2 GPUs" in table
    assert "With 1, " in flat(table)
    assert "NCCL" in table
    assert found.to_json()["fewest_gpus"] == 2


def test_a_margin_and_a_measured_context_take_their_part_of_each_gpu(least_peaks):
    device = card(least_peaks[2])
    limits = {int(least_peaks[2] / 1.01): {"margin": 0.01}}
    limits[least_peaks[2]] = {"context_bytes": CONTEXT_BYTES + MIB}
    for limit, options in limits.items():
        found = fewest_gpus(MODEL, device, global_batch=BATCH, most=2, **options)
        assert found.best is None
        assert {one.limit_bytes for one in found.attempts} == {limit}


def test_no_change_is_needed_where_all_fits():
    roomy = fewest_gpus(mlp(depth=2), card(80 * 1024 * MIB), global_batch=1)
    assert [(one.num_gpus, one.change) for one in roomy.attempts] == [(1, CHANGES[0])]


def test_what_blocks_hold_with_the_whole_loss_is_a_floor_for_the_loss_in_chunks():
    with Sketch(transformer(depth=2, dim=32, vocabulary=512, length=64), kernels="cuda") as sketch:
        plain = sketch.step(8)
        chunked = sketch.step(8, change=apply_chunked_loss)
    floor = CONTEXT_BYTES + floor_of(plain)
    assert floor > CONTEXT_BYTES + plain.fixed
    memory = cuda_memory(chunked.trace, workspace_bytes=workspace_of("h100"))
    assert floor <= memory.allocated_bytes + CONTEXT_BYTES
    assert floor > 0.7 * (chunked.peak_bytes + CONTEXT_BYTES)
