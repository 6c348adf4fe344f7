"""Policies, offload, recomputed timesteps and grad-flow under DDP and FSDP2.

python -m pytest tests/primitives/test_techniques_on_ranks.py
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from curry_train.gates.two_ranks import GradientSyncs
from curry_train.primitives import (
    GradFlow,
    GradientAccumulation,
    apply_sac,
    offload_blocks,
    offload_report,
    recompute_blocks,
    recompute_timesteps,
    train_window,
)
from curry_train.workloads import Case, load_workload
from curry_train.workloads.models import transformer

from ..peers.peer_ranks import require_same_on_ranks, shard_layers, whole
from ..peers.peer_table import LEVERS
from ..plan_models import Called, Runs
from ..rank_calls import run_on_ranks
from ..toy_steps import all_equal, gradients_of

KINDS = {"ddp": nn.parallel.DistributedDataParallel, "fsdp2": shard_layers}


def step_on_ranks(name, kind, technique):
    """Return collectives and gradients of the second step of a built-in model, and the model."""
    case = Case(load_workload(name))
    batch = case.split(case.batch(4), [2, 2])[dist.get_rank()]
    model = case.build()
    technique(model)
    wrapped = KINDS[kind](model)
    for _ in range(2):
        wrapped.zero_grad()
        with GradientSyncs() as counted:
            case.workload.mean_loss(wrapped, batch).backward()
    gradients = [whole(parameter.grad).tolist() for parameter in wrapped.parameters()]
    return counted.num_calls, gradients, model


def compare_on_ranks(name, technique):
    """Return for each kind of ranks if a technique changes no gradient and adds no collective."""
    found = []
    for kind in KINDS:
        plain, changed = (step_on_ranks(name, kind, act)[:2] for act in (id, technique))
        found.append(plain[0] > 0 and plain == changed)
    return found


def moved_bytes(kind):
    """Return the bytes that offload moves, brings back, and leaves as those of parameters."""
    report = offload_report(step_on_ranks("shrink=2:transformer", kind, offload_blocks)[2])
    in_parameters, _ = report.skipped["parameter or buffer"]
    return [report.moved_bytes, report.brought_back_bytes, in_parameters]


def all_on_this_rank():
    return {
        "moved": [*map(moved_bytes, KINDS)],
        "timesteps": compare_on_ranks("snn", recompute_timesteps),
        "collectives": collectives_on_ranks(),
        "flow": flow_on_ranks(),
    }


@pytest.fixture(scope="module")
def answers():
    return run_on_ranks(f"{__file__}:all_on_this_rank", timeout=280.0)


def test_two_ranks_have_the_same_gradients_and_as_many_collectives(answers):
    assert [found["timesteps"] for found in answers] == [[True] * 2] * 2


def budget_on_this_rank():
    # Imported here because this imports the compiler, which takes seconds.
    from curry_train.primitives import memory_budget

    return compare_on_ranks(
        "transformer", lambda model: memory_budget(model, 0.2, backend="aot_eager")
    )


def test_two_ranks_have_the_same_gradients_with_a_memory_budget():
    assert run_on_ranks(f"{__file__}:budget_on_this_rank") == [[True] * 2] * 2


def test_offload_moves_the_same_bytes_under_ddp_and_fsdp2(answers):
    for found in answers:
        ((moved, brought_back, _), _) = reports = found["moved"]
        assert moved == brought_back > 0
        assert reports[0] == reports[1]


def reducing():
    """A block with a collective of its own, as under tensor parallelism."""

    def run(inner, x):
        total = torch.distributed._functional_collectives.all_reduce(
            torch.sin(inner[0](x)).detach(), "sum", dist.group.WORLD
        )
        return x + torch.sin(inner[0](x) * total)

    return Runs(run, nn.Linear(8, 8, bias=False))


def collectives_on_ranks():
    calls = []
    gradients = []
    for policy in (None, "save_expensive", ["aten.mm"]):
        torch.manual_seed(0)
        model = nn.Sequential(reducing(), reducing())
        if policy:
            apply_sac(model, policy)
        with Called() as called:
            model(torch.full((2, 8), 1.0 + dist.get_rank())).square().sum().backward()
        calls.append(called.operations.count(torch.ops._c10d_functional.all_reduce.default))
        gradients.append(gradients_of(model))
    return [calls, [all_equal(gradients[0], other) for other in gradients[1:]]]


def test_collectives_are_kept_or_repeated_on_all_ranks_alike(answers):
    for calls, equal in (found["collectives"] for found in answers):
        assert calls == [2, 2, 4]
        assert equal == [True, True]


# Parts of a block may be sharded.


def require_same_with_sharded_parts():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for lever, reshard in itertools.product(("recompute", "segments"), (True, False)):

        def shard(model, reshard=reshard):
            for block in model.layers:
                for part in (block.first, block.last):
                    fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
            return model

        require_same_on_ranks(LEVERS[lever], shard)


def test_parts_of_what_is_recomputed_may_be_sharded():
    run_on_ranks(f"{__file__}:require_same_with_sharded_parts")


# Norms and counts of layers, which the ranks add up.

CASE = Case(transformer(depth=2, dim=32, length=16, vocabulary=63))  # 63: shards of unequal size
RANKS, WAYS = (*KINDS, "fsdp2 accumulated"), (False, True)


def figures(kind, *, recompute, rank=None):
    """Return norms and counts of activation, gradient and update of each layer in a step.

    For the step also what `train_window` says of it.
    """
    model, batch = CASE.build(), CASE.batch(8)
    if rank is not None:
        batch = CASE.split(batch, [4, 4])[rank]
    if recompute:
        recompute_blocks(model)
    if kind != "bare":
        model = KINDS[kind.split()[0]](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    parts = CASE.split(batch, [2, 2]) if "accumulated" in kind else [batch]
    with GradFlow(model, optimizer, every=1) as flow:
        (window,) = GradientAccumulation(len(parts)).windows(parts)
        result = train_window(model, window, CASE.workload.mean_loss, optimizer)
    (record,) = flow.records
    found = {"": [*sums_of(record.gradient), result.loss, result.grad_norm, record.ranks]}
    for name, layer in record.layers.items():
        found[name] = sums_of(layer.activation)
        if layer.gradient is not None:
            found[name] += sums_of(layer.gradient)
            found[name] += [layer.update.weight_norm, layer.update.distance]
    return found


def sums_of(spread):
    return [spread.norm, spread.elements, spread.zeros]


def flow_on_ranks():
    return {
        f"{kind} {way}": figures(kind, recompute=way, rank=dist.get_rank())
        for kind in RANKS
        for way in WAYS
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", RANKS)
def test_figures_on_two_ranks_are_those_of_one_process(kind, way, answers):
    expected = figures("bare", recompute=way)
    assert len(answers) == 2
    for found in answers:
        layers = found["flow"][f"{kind} {way}"]
        assert layers.keys() == expected.keys()
        assert layers[""][-1] == 2  # ranks
        for name, values in layers.items():
            assert values == pytest.approx(
                [*expected[name][:-1], 2] if name == "" else expected[name], rel=1e-6
            ), name
