"""Measured figures are exact and repeatable: bytes against the CPU's allocator, FLOPs by hand.

python -m pytest tests/core/test_measure.py
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.core.measure import FlopCount, LiveStorages, measure_memory
from curry_train.core.measure_compiled import measure_allocated

from ..plan_models import Runs
from ..toy_steps import square_sum


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("to_sparse", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_tensor_counts_with_its_indices_and_values(to_sparse):
    with LiveStorages() as storages:
        made = getattr(torch.eye(16), to_sparse)()
        lives = storages.lives_of(made)
    assert len(lives) == (2 if made.layout is torch.sparse_coo else 3)
    assert sum(life.nbytes for life in lives) >= 2 * 16 * 4  # values and one row of indices
    assert storages.bytes_alive == sum(life.nbytes for life in lives)


def test_attention_with_fewer_key_heads_is_counted_by_its_query_heads():
    q, k = torch.randn(1, 4, 16, 8, requires_grad=True), torch.randn(1, 2, 16, 8)
    with FlopCount() as forward:
        out = F.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum()
    with FlopCount() as backward:
        out.backward()
    one_product = 2 * 4 * 16 * 16 * 8
    assert (forward.flops, backward.flops) == (2 * one_product, 5 * one_product)


WIDTH = 64
ROWS = 100


def three_uses(layers, x):
    y = layers[0](x)
    return torch.tanh(y) + torch.sigmoid(y) + F.gelu(y)


def four_sums(layers, x):
    y = layers[0](x)
    return torch.relu(layers[1](y) + layers[2](y) + layers[1](y) + layers[2](y))


def gathered(layers, x):
    columns = torch.zeros(ROWS, 8, dtype=torch.long)
    return torch.tanh(torch.gather(torch.tanh(layers[0](x)), 1, columns))


def indexed(layers, x):
    return torch.tanh(layers[0](x))[torch.arange(50)]


def variance_and_mean(layers, x):
    """The formula of one node adds two terms, and makes a new tensor in eager mode too."""
    variance, mean = torch.var_mean(torch.tanh(layers[0](x)), 1)
    return variance + mean


def of_layers(run):
    return Runs(run, *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


@pytest.mark.parametrize("run", [three_uses, four_sums, gathered, indexed, variance_and_mean])
def test_the_peak_is_that_of_the_cpus_own_allocations(run):
    model = of_layers(run)
    x = torch.randn(ROWS, WIDTH)
    assert measure_memory(model, x, square_sum) == measure_allocated(model, x, square_sum)


def test_a_sum_has_one_record_whose_bytes_end_with_it():
    model = of_layers(three_uses)
    x = torch.randn(ROWS, WIDTH)
    with LiveStorages() as storages:
        square_sum(model, x).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert storages.bytes_alive == sum(gradient.nbytes for gradient in gradients)
    del gradients
    model.zero_grad(set_to_none=True)
    assert storages.bytes_alive == 0
    assert all(life.died is not None for life in storages.lives)


class Dropped(torch.autograd.Function):
    """Hand on a tensor, and drop its gradient."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return None


def test_a_sum_that_is_dropped_before_the_next_operation_counts_once():
    x = torch.randn(WIDTH, requires_grad=True)
    with LiveStorages() as storages:
        y = Dropped.apply(x)
        (y.sin() + y.cos()).sum().backward()
        del y
    assert storages.bytes_alive == 0
    # Each storage is made once and freed once, and in this order.
    events = {}
    for life, is_made in storages.events:
        events.setdefault(id(life), []).append(is_made)
    assert events == {id(life): [True, False] for life in storages.lives}
