"""Under DDP and FSDP2 on two gloo ranks the figures are those of one process.

python -m pytest tests/primitives/test_grad_flow_ranks.py
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives import GradFlow, recompute_blocks
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case

CASE = Case(transformer(depth=2, dim=32, length=16, vocabulary=63))  # 63: shards of unequal size
RANKS, WAYS = ("ddp", "fsdp2", "fsdp2 accumulated"), (False, True)


def wrapped(kind, model):
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def figures(kind, *, recompute, rank=None):
    """Return norms and counts of activation, gradient and update of each layer in a step."""
    model, batch = CASE.build(), CASE.batch(8)
    if rank is not None:
        batch = CASE.split(batch, [4, 4])[rank]
    if recompute:
        recompute_blocks(model)
    if kind != "bare":
        model = wrapped(kind.split()[0], model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    parts = CASE.split(batch, [2, 2]) if "accumulated" in kind else [batch]
    with GradFlow(model, optimizer, every=1) as flow:
        for index, part in enumerate(parts):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(index == len(parts) - 1)
            (CASE.workload.mean_loss(model, part) / len(parts)).backward()
        optimizer.step()
    (record,) = flow.records
    found = {
        "": [record.gradient.norm, record.gradient.zeros, record.gradient.elements, record.ranks]
    }
    for name, layer in record.layers.items():
        activation = layer.activation
        gradient = layer.gradient
        update = layer.update
        found[name] = [activation.norm, activation.elements, activation.zeros]
        if gradient is not None:
            found[name] += [
                gradient.norm,
                gradient.elements,
                gradient.zeros,
                update.weight_norm,
                update.distance,
            ]
    return found


def all_on_this_rank():
    torch.set_num_threads(1)
    found = {
        f"{kind} {way}": figures(kind, recompute=way, rank=dist.get_rank())
        for kind in RANKS
        for way in WAYS
    }
    return [found, without_a_group()]


def without_a_group():
    model = CASE.build()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    with GradFlow(model, every=1) as flow:
        CASE.workload.mean_loss(model, CASE.batch(2)).backward()
        flow.step()
    return [flow.records[0].ranks, *flow.records[0].notes]


@pytest.fixture(scope="module")
def answers():
    return run_on_ranks(f"{__file__}:all_on_this_rank", timeout=280.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", RANKS)
def test_figures_on_two_ranks_are_those_of_one_process(kind, way, answers):
    expected = figures("bare", recompute=way)
    assert len(answers) == 2
    for found, _ in answers:
        layers = found[f"{kind} {way}"]
        assert layers.keys() == expected.keys()
        assert layers[""][-1] == 2  # ranks
        for name, values in layers.items():
            assert values == pytest.approx(
                [*expected[name][:3], 2] if name == "" else expected[name], rel=1e-6
            ), name


def test_a_batch_without_a_known_group_of_ranks_is_reported(answers):
    for _, (ranks, note) in answers:
        assert ranks == 1
        assert "this rank only" in note
