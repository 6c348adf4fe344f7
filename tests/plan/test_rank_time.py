"""Times of ranks: collectives of their programs, their links, and what overlaps.

python -m pytest tests/plan/test_rank_time.py
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from curry_train.plan import Plan, Sharding, Sketch, plan
from curry_train.plan.device import PROFILES
from curry_train.plan.estimate import count_window, time_of_window
from curry_train.plan.rank_time import (
    COLLECTIVE_SECONDS,
    LINKS_OF_PROFILES,
    Collective,
    Links,
    StepCourse,
    links_of,
    parse_links,
    time_of_course,
)
from curry_train.workloads.models import mlp
from ranks import small

from ..plan_models import estimated, trace_of

# Every first dimension is a multiple of 64, so that no parameter is padded.
MODEL = small(depth=2, dim=64, vocabulary=256, hidden=128, heads=2, kv_heads=2)
BYTES = sum(parameter.nbytes for parameter in MODEL.build().parameters())
UNITS = 3  # two blocks, and what is outside of them


def step_of(kind, *, accumulated=False, kernels="cpu", **options):
    sharding = Sharding(kind, **options)
    return estimated(MODEL, 2, accumulated=accumulated, kernels=kernels, sharding=sharding)


def calls_and_bytes(counts):
    return {kind: (count["calls"], count["bytes"]) for kind, count in counts.items()}


def test_fsdp2_gathers_all_parameters_twice_and_scatters_their_gradients_once():
    fsdp = step_of("fsdp2", ranks=8, reshard_after_forward=True, accumulated=True)
    gathers = {"all-gather": (2 * UNITS, 2 * BYTES)}
    scatters = {"reduce-scatter": (UNITS, BYTES)}
    assert calls_and_bytes(count_window(fsdp, 1)) == gathers | scatters
    window = calls_and_bytes(count_window(fsdp, 3))
    assert window == {"all-gather": (6 * UNITS, 6 * BYTES)} | scatters


def test_ddp_reduces_all_gradients_once_a_window():
    step = step_of("ddp", ranks=8, accumulated=True)
    assert calls_and_bytes(count_window(step, 1)) == {"all-reduce": (1, BYTES)}
    assert not step.middle_course.collectives


def test_hsdp_reduces_the_part_of_a_rank_among_the_replicas():
    course = step_of("hsdp", mesh={"replicate": 2, "shard": 4}).course
    reduced = [one for one in course.collectives.values() if one.kind == "all-reduce"]
    assert sum(one.nbytes for one in reduced) == BYTES // 4
    assert {one.ranks for one in reduced} == {(0, 4)}
    scattered = [one for one in course.collectives.values() if one.kind == "reduce-scatter"]
    assert {one.ranks for one in scattered} == {(0, 1, 2, 3)}


GIGA = 10**9


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all-reduce", range(8), 2 * 7 / 8 / 100),
        ("reduce-scatter", range(4), 3 / 4 / 100),
        # Eight GPUs of each node have a way of 10 GB/s each to the next node.
        ("all-gather", range(16), 15 / 16 / 80),
        # One GPU of each node.
        ("all-reduce", (0, 8), 2 * 1 / 2 / 10),
        ("send", (0, 1), 1 / 100),
        ("all-gather", (0,), -COLLECTIVE_SECONDS),
    ],
)
def test_a_collective_takes_the_time_of_a_ring(kind, ranks, seconds):
    links = Links(100 * GIGA, 10 * GIGA)
    found = links.seconds(Collective(kind, GIGA, tuple(ranks), blocks_stream=True))
    assert math.isclose(found, COLLECTIVE_SECONDS + seconds, abs_tol=1e-12)


def course_of(rows, waits):
    """Make a course from rows of stream and bytes moved, or of stream and a collective."""
    return StepCourse(
        flops=[0] * len(rows),
        moved=[0 if isinstance(what, Collective) else what for _, what in rows],
        streams=[stream for stream, _ in rows],
        collectives={
            index: what for index, (_, what) in enumerate(rows) if isinstance(what, Collective)
        },
        waits=waits,
    )


# One second for each byte, and for each byte of a collective of two ranks.
SLOW = replace(PROFILES["cpu"], bytes_per_second=1.0, dispatch_seconds=1e-9)
SLOW_LINKS = Links(0.5, 0.5)
GATHER = Collective("all-gather", 3, (0, 1), blocks_stream=True)
SCATTER = Collective("reduce-scatter", 3, (0, 1), blocks_stream=True)
# Rows of a unit of FSDP2: the gather of its parameters, and their copy.
UNIT = ((1, GATHER), (0, 1e-6))


@pytest.mark.parametrize(
    ("rows", "waits", "exposed"),
    [
        # The computation waits for the first unit; the second comes while the first computes.
        ([*UNIT, (0, 5), *UNIT, (0, 5)], {1: [0], 4: [3]}, 3),
        # No unit is gathered before the computation uses the one before, so this one waits too.
        ([*UNIT, (0, 2), *UNIT, (0, 2)], {1: [0], 4: [3]}, 3 + 1),
        # Gradients are scattered while backward goes on, and the last ones at its end.
        ([(0, 4), (2, SCATTER), (0, 4), (2, SCATTER)], {1: [0], 3: [2]}, 3),
        # A gather that does not block its stream is waited for by what reads its output.
        ([(0, 4), (0, replace(GATHER, blocks_stream=False)), (0, 2), (0, 1)], {3: [1]}, 3 - 2),
        # The links take one collective at a time.
        ([(1, GATHER), (2, SCATTER)], {}, 3 + 3),
    ],
)
def test_communication_overlaps_with_the_computation_that_does_not_wait_for_it(
    rows, waits, exposed
):
    found = time_of_course(course_of(rows, waits), SLOW, SLOW_LINKS, dtype="float32")
    assert math.isclose(found.exposed, exposed, abs_tol=1e-3)
    assert math.isclose(
        found.communication, 3 * sum(isinstance(what, Collective) for _, what in rows), abs_tol=1e-3
    )
    assert found.total == found.compute + found.exposed


def test_a_plan_of_ranks_has_the_time_of_its_communication(monkeypatch):
    step = mock.create_autospec(Sketch.step, side_effect=Sketch.step)
    monkeypatch.setattr(Sketch, "step", step)
    timed = mock.Mock(wraps=time_of_course)
    monkeypatch.setattr("curry_train.plan.estimate.time_of_course", timed)
    options = {"device": "cpu", "chunked_loss": False, "without": ("sac", "regions", "full")}
    links = Links(1e6, 1e6)
    sharding = Sharding("fsdp2", 8, precision="bfloat16")
    model = mlp(depth=2, width=64)
    num_bytes = sum(parameter.nbytes for parameter in model.build().parameters())
    slow = plan(model, 2**30, **options, global_batch=8, sharding=sharding, links=links)
    # The planned step is as it is, and was estimated once.
    assert [call.args[1] for call in step.call_args_list].count(1) == 1
    assert {call.kwargs["dtype"] for call in timed.call_args_list} == {"bfloat16"}
    found = slow.communication
    parts = ("compute_seconds", "exposed_seconds", "optimizer_seconds")
    assert math.isclose(slow.step_seconds, sum(found[name] for name in parts))
    assert found["communication_seconds"] > found["exposed_seconds"] > num_bytes / 1e6
    assert found["collectives"]["reduce-scatter"]["bytes"] >= num_bytes
    text = " ".join(slow.explain().split())
    assert "estimated, not measured" in text
    assert "0.001 GB/s within nodes of 8" in text
    assert Plan.from_json(slow.to_json()).communication == found


def test_products_of_a_way_of_the_users_own_take_the_time_of_the_dtype_of_its_policy():
    def own(model, mesh):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for one in (*model.layers, model):
            fully_shard(one, mesh=mesh, mp_policy=policy)

    ways = ((own, {}), ("fsdp2", {"precision": "bfloat16"}), ("fsdp2", {}))
    mixed, built_in, plain = (
        time_of_window(
            step_of(kind, ranks=2, **options), PROFILES["cpu"], SLOW_LINKS, steps=1
        ).compute
        for kind, options in ways
    )
    # The CPU has no half-precision products.
    assert mixed == built_in > 2 * plain


def test_parameters_that_fsdp2_keeps_on_the_host_are_refused():
    def on_host(model, mesh):
        fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, mesh=mesh)

    sharding = Sharding(on_host, 2)
    with pytest.raises(ValueError, match="CPUOffloadPolicy is not planned: plan without it"):
        trace_of(mlp(depth=2, width=4), sharding=sharding)


def test_links_are_read_as_they_are_written_and_known_by_gpu():
    assert parse_links("450GB,50GB") == Links(450e9, 50e9)
    assert parse_links("32GB, 1.5GB, 4") == Links(32e9, 1.5e9, 4)
    assert links_of("h100") == LINKS_OF_PROFILES["h100"]
    assert "PCIe" in links_of("NVIDIA of another kind").source
