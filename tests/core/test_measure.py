"""Measured figures are exact and repeatable: bytes against torch's tracker, FLOPs by hand.

python -m pytest tests/core/test_measure.py
"""

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from curry_train.core.measure import (
    FlopCount,
    LiveStorages,
    count_flops,
    measure_memory,
    recompute_flops,
)
from curry_train.workloads.models import load_workload
from curry_train.workloads.workload import Case


def square_sum(module, batch):
    return module(batch).square().sum()


def test_held_and_peak_bytes_of_two_layers_by_hand():
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Sigmoid())
    memory = measure_memory(module, torch.randn(4, 8), square_sum)
    matrix, loss = 4 * 16 * 4, 4
    # Held: the sigmoid's output and the loss; the square is freed after the sum.
    assert memory.held_bytes == matrix + loss
    gradient_of_weight = 8 * 16 * 4
    assert memory.peak_bytes >= memory.held_bytes + matrix + gradient_of_weight


@pytest.mark.parametrize("name", ["mlp", "transformer", "resnet"])
def test_peak_equals_what_torch_tracks(name):
    case = Case(load_workload(name))
    module, batch = case.build(), case.batch()
    loss = case.workload.mean_loss
    tracker = MemTracker()
    tracker.track_external(module, *tree_leaves(batch))
    with tracker:
        start = tracker.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
        loss(module, batch).backward()
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - start
    for parameter in module.parameters():
        parameter.grad = None
    assert measure_memory(module, batch, loss).peak_bytes == theirs


def test_earlier_tensors_do_not_count_and_views_count_once():
    before = torch.ones(1000)
    with LiveStorages() as storages:
        view = before.view(10, 100)
        assert storages.bytes_alive == 0
        made = torch.zeros(50)
        alias, _ = made[10:], made.t()
        assert storages.bytes_alive == 200
        del made
        assert storages.bytes_alive == 200
        del alias, _
        assert storages.bytes_alive == 0
        assert storages.bytes_peak == 200
    assert view.sum() == 1000


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("to_sparse", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_tensor_counts_with_its_indices_and_values(to_sparse):
    with LiveStorages() as storages:
        made = getattr(torch.eye(16), to_sparse)()
        lives = storages.lives_of(made)
    assert len(lives) == (2 if made.layout is torch.sparse_coo else 3)
    assert sum(life.nbytes for life in lives) >= 2 * 16 * 4  # values and one row of indices
    assert storages.bytes_alive == sum(life.nbytes for life in lives)


def test_attention_on_cpu_is_counted():
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    module = nn.Linear(8, 8)
    flops = count_flops(module, v, lambda m, x: F.scaled_dot_product_attention(q, k, m(x)).sum())
    projection, attention = 2 * 2 * 16 * 8 * 8, 2 * 2 * (2 * 16 * 16 * 8)
    assert flops.forward == projection + attention
    assert flops.backward > flops.forward


def test_attention_with_fewer_key_heads_is_counted_by_its_query_heads():
    q, k = torch.randn(1, 4, 16, 8, requires_grad=True), torch.randn(1, 2, 16, 8)
    with FlopCount() as forward:
        out = F.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum()
    with FlopCount() as backward:
        out.backward()
    one_product = 2 * 4 * 16 * 16 * 8
    assert (forward.flops, backward.flops) == (2 * one_product, 5 * one_product)


def test_recomputed_flops_equal_those_of_the_forward():
    module = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    plain = count_flops(module, torch.randn(4, 8), square_sum)
    flops = count_flops(
        module,
        torch.randn(4, 8),
        lambda module, batch: checkpoint(module, batch, use_reentrant=False).square().sum(),
    )
    assert recompute_flops(plain, flops) == plain.forward
