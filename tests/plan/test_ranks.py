"""Predicted peaks of ranks equal those of real processes, at any size of the world.

python -m pytest tests/plan/test_ranks.py
"""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ranks
from curry_train import primitives
from curry_train.plan import Infeasible, Sharding, Sketch, plan
from curry_train.plan.costs import drop_saved_tensors
from curry_train.plan.cuda_step import cuda_memory
from curry_train.plan.rank_step import one_rank
from curry_train.plan.record import RankStorages
from curry_train.workloads.models import mlp
from ranks import predict, small

from ..plan_models import Runs, estimated, squares, trace_of
from ..rank_calls import run_on_ranks

# Some at two ranks; `benchmarks/ranks.py` compares all of them, at four ranks too.
COMPARED = (
    "fsdp2",
    "fsdp2, window, recompute, bfloat16",
    "fsdp2, uneven shards",
    "ddp, window",
    "tp",
)
# A mistake in a program, and the program without it.
MISTAKE = "fsdp2, window, never synced"
RIGHT = "fsdp2, window"
predicted = functools.cache(predict)


@pytest.fixture(scope="module")
def real():
    """Measure real ranks on gloo."""
    target = f"{Path(ranks.__file__).resolve()}:measure_all"
    return run_on_ranks(target, names=[*COMPARED, MISTAKE, RIGHT], repeats=2)


@pytest.mark.parametrize("name", COMPARED)
def test_the_peak_of_a_rank_equals_that_of_a_real_process_to_the_byte(real, name):
    assert predicted(name, 2, 0) == real[0][name]


def test_a_mistake_changes_the_predicted_peak_as_it_changes_that_of_a_real_process(real):
    with pytest.warns(UserWarning, match="the optimizer steps without them"):
        found = predicted(MISTAKE, 2, 0)
    assert found - predicted(RIGHT, 2, 0) == real[0][MISTAKE] - real[0][RIGHT] != 0


def test_uneven_shards_are_those_of_the_rank_that_is_asked_for(real):
    name = "fsdp2, uneven shards"
    assert predict(name, 2, 1) == real[1][name]


def owners(world, *, rank):
    # Every first dimension is a multiple of 1,024, so that no parameter is padded.
    model = small(depth=1, dim=1024, vocabulary=2048, hidden=2048, heads=8, kv_heads=8)
    return estimated(model, 1, sharding=Sharding("fsdp2", world, rank=rank)).timeline


def test_state_is_divided_by_64_to_1024_ranks_and_what_is_gathered_stays():
    few = owners(64, rank=0)
    many = owners(1024, rank=1023)
    for group in ("parameters", "optimizer state"):
        # AdamW counts its steps in a tensor of 4 bytes for each parameter, which stays.
        numbers = 4 * 12 if group == "optimizer state" else 0
        assert few.owners[group][0] - numbers == 16 * (many.owners[group][0] - numbers)
    assert max(many.owners["gathered parameters"]) == max(few.owners["gathered parameters"])


def test_a_sync_of_each_microbatch_leaves_no_whole_gradients_to_a_rank():
    peaks = []
    for syncs in (False, True):
        sharding = Sharding("fsdp2", 8, sync_each_microbatch=syncs)
        peaks.append(estimated(small(depth=1), 1, accumulated=True, sharding=sharding).peak_bytes)
    assert peaks[1] < peaks[0]


def test_a_world_that_cannot_be_is_refused_in_one_line():
    too_many = pytest.raises(ValueError, match="2048 ranks are asked for, and 1024 is the most")
    with too_many, one_rank({"dp": 2048}):
        pass
    in_group = pytest.raises(RuntimeError, match="in a process group already")
    with one_rank({"dp": 2}), in_group, one_rank({"dp": 2}):
        pass


def test_a_parallelize_of_the_users_own_runs_without_a_name():
    seen = []

    def parallelize(model, mesh):
        seen.append((type(model).__name__, tuple(mesh.mesh_dim_names), mesh.size()))
        return ranks.root_alone(model, mesh)

    found = estimated(replace(small(), parallelize=parallelize), 2, sharding=Sharding(ranks=4))
    assert seen == [("Transformer", ("dp",), 4)]
    assert found.timeline.owners["collective buffers"]


def test_the_streams_of_fsdp2_have_pools_of_their_own_in_cudas_allocator():
    trace = trace_of(small(dim=512), 2, sharding=Sharding("fsdp2", 8))
    # Copy-in of all-gathers and reduce-scatter, beside the default stream.
    assert len({*trace.streams.values()}) == 2
    together = cuda_memory(replace(trace, streams={}))
    assert together.reserved_bytes < cuda_memory(trace).reserved_bytes


def sharing():
    """Blocks that share a layer, which FSDP2 refuses to divide twice."""
    shared = nn.Linear(16, 16)
    blocks = (
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), shared) for _ in range(2)
    )
    return nn.Sequential(*blocks)


def test_what_fsdp2_refuses_is_one_line_and_no_way_out_of_a_plan_that_does_not_fit():
    workload = squares(sharing, 16)
    with pytest.raises(ValueError, match=r"fsdp2 refuses Sequential: .*share none"):
        estimated(workload, 2, sharding=Sharding("fsdp2", 2))
    with pytest.raises(Infeasible, match="nothing fits") as refused:
        plan(workload, 1000, device="cpu")
    assert "FSDP2" not in str(refused.value)


def test_a_loss_in_chunks_runs_in_chunks_under_fsdp2_too():
    models = []

    def change(module):
        primitives.apply_chunked_loss(module, chunk_tokens=4)
        models.append(module)

    estimated(small(depth=1), 1, change=change, sharding=Sharding("fsdp2", 2))
    (use,) = primitives.chunked_loss_report(models[0]).values()
    assert str(use) == "losses in chunks: 1"


def test_two_ranks_of_one_world_are_predicted_in_one_process():
    # DTensor caches what belongs to a mesh, and the meshes of the ranks are equal.
    peaks = set()
    for rank in (0, 3):
        sharding = Sharding("fsdp2+tp", mesh={"dp": 2, "tp": 2}, rank=rank)
        peaks.add(estimated(small(depth=1), 1, sharding=sharding).peak_bytes)
    assert len(peaks) == 1


@pytest.mark.parametrize(
    "sharding", [Sharding("fsdp2", 2), Sharding("fsdp2+tp", mesh={"dp": 2, "tp": 2})]
)
def test_offload_moves_activations_of_a_rank_and_none_of_its_weights(sharding):
    moved = []
    for shared in (Sharding(), sharding):
        with Sketch(small(depth=1), sharding=shared) as sketch:
            plain = sketch.step(1)
            away = sketch.step(1, change=functools.partial(drop_saved_tensors, names=["layers.0"]))
            moved.append(plain.timeline.after["forward"] - away.timeline.after["forward"])
    alone, on_a_rank = moved
    if sharding.kind == "fsdp2":
        assert on_a_rank == alone
    else:  # `offload_blocks` leaves DTensors where they are
        assert 0 < on_a_rank < alone


def stop_with_module(model, mesh):
    raise SystemExit(f"{model} " * 200)


@pytest.mark.parametrize(
    ("parallelize", "message"),
    [
        (lambda model, mesh: mesh["data"], r"raised KeyError: .*dimensions are dp$"),
        (lambda model: model, r"raised TypeError: .* takes 1 positional argument"),
        (
            stop_with_module,
            r"stop_with_module raised SystemExit: .* \[\.\.\.\] \(.*test_ranks.py:\d+\)",
        ),
        (lambda model, mesh: 3, "returned int: return the module to train"),
    ],
)
def test_a_parallelize_that_fails_is_one_line_with_its_place(parallelize, message):
    with one_rank({"dp": 2}) as mesh, pytest.raises(ValueError, match=message) as refused:
        Sharding(parallelize, 2).parallelize(nn.Linear(2, 2), mesh)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700


def test_a_parallelize_that_shares_nothing_is_named():
    with pytest.warns(UserWarning, match="no rank communicates with another"):
        estimated(mlp(depth=2, width=4), 1, sharding=Sharding(ranks.keep, 2))


def test_a_forward_that_fails_after_parallelize_is_one_line():
    shared = Sharding(lambda model, mesh: Runs(lambda inner, x: inner.gone(x), model), 2)
    message = r"a forward of Runs after parallelize raised AttributeError: .*test_ranks.py"
    with pytest.raises(ValueError, match=message):
        estimated(mlp(depth=2, width=4), 1, sharding=shared)
    assert not torch.distributed.is_initialized()


def test_a_storage_at_the_address_of_one_that_gave_up_its_bytes_counts(pair_of_four_ranks):
    with RankStorages() as storages:
        gathered = torch.ones(8)
        address = gathered.untyped_storage()._cdata
        gathered.untyped_storage().resize_(0)
        del gathered
        others = [torch.ones(8) for _ in range(99)]
        assert address in {one.untyped_storage()._cdata for one in others}
        assert storages.bytes_alive == 99 * 32
