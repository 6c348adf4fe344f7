"""Offload trains the same model, moves each storage once and returns every buffer.

python -m pytest tests/primitives/test_offload.py
"""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from curry_train.core.parity import compare, record_step
from curry_train.primitives.offload import offload_blocks, offload_report
from curry_train.primitives.recompute import recompute_blocks


def chain(block, depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(depth)])


def square_sum(module, batch):
    return module(batch).square().sum()


def gelu_block(width=32):
    return nn.Sequential(nn.Linear(width, width), nn.GELU())


@pytest.fixture
def batch():
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def twins(block, depth=3, **options):
    plain, model = chain(block, depth), chain(block, depth)
    offload_blocks(model, keep_last=0, **options)
    return plain, model


# Tensors that move, and tensors that stay.


class Views(torch.autograd.Function):
    """Save views of one storage, the last unknown to autograd, and record what comes back."""

    @staticmethod
    def forward(ctx, x, seen):
        rows = torch.randn(64, 96)
        saved = [rows[:, 32:64], rows.t(), rows[3:9, ::2], rows.view(torch.int32)]
        seen["saved"] = [
            (tensor.clone(), tensor.stride(), tensor.storage_offset()) for tensor in saved
        ]
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        return x + rows[:, :32]

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen["back"] = ctx.saved_tensors
        return gradient, None


class ViewBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(32)), {}

    def forward(self, x):
        return Views.apply(x * self.weight, self.seen)


def test_views_share_one_copy_and_come_back_with_shape_stride_and_offset(batch):
    model = nn.Sequential(ViewBlock())
    offload_blocks(model, blocks="0", keep_last=0)
    model(batch).sum().backward()
    seen = model[0].seen
    for (value, stride, offset), back in zip(seen["saved"], seen["back"], strict=True):
        assert torch.equal(value, back)
        assert (back.stride(), back.storage_offset()) == (stride, offset)
    assert len({back.untyped_storage().data_ptr() for back in seen["back"][:3]}) == 1
    report = offload_report(model)
    assert (
        report.moved_bytes == report.brought_back_bytes == 64 * (32 + 96) * 4
    )  # the batch and the rows
    assert report.skipped["alias of what moved"] == (1, 64 * 96 * 4)


class Transposed(nn.Module):
    """A block that reads its weight as a transposed view, and a table that its model owns."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x, table):
        return (x @ self.weight.t()) * table


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Transposed() for _ in range(3))
        self.register_buffer("table", torch.rand(64, 64))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.table[: len(x)])
        return x


@pytest.mark.parametrize(
    "way", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_no_parameter_and_no_buffer_moves_though_another_module_owns_it(way):
    model = WithTable()
    offload_blocks(model, keep_last=0)
    model = way(model)
    square_sum(model, torch.randn(64, 64)).backward()
    report = offload_report(model)
    assert report.skipped == {
        "parameter or buffer": (5, 5 * 64 * 64 * 4)
    }  # the batch needs no gradient: 2 weights
    # The batch, and the inputs of the second and third; a product with a table that needs no
    # gradient saves that table.
    assert report.moved_bytes == 3 * 64 * 64 * 4


def test_small_sliced_and_sparse_tensors_stay(batch):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 32))
            self.small = nn.Parameter(torch.ones(8))

        def forward(self, x):
            sparse = torch.eye(64).to_sparse()
            return torch.sparse.mm(sparse, x * self.weight).sum() + torch.exp(self.small * 2).sum()

    model = nn.Sequential(Block())
    offload_blocks(model, blocks="0", keep_last=0)
    data = torch.randn(1024, 32)
    model(data[64:128]).backward()
    assert set(offload_report(model).skipped) == {
        "slice of data",
        "too small",
        "no plain tensor of the device",
    }
    assert offload_report(model).num_moved == 0
    table = offload_report(model).table().splitlines()
    assert table[0] == "moved to the host        0.00 MiB  0 storages"
    assert {line.partition(": ")[2] for line in table[2:]} == set(offload_report(model).skipped)


# The same training, in every kind of step.


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(32, 32)

    def forward(self, x):
        return self.cell(x)[0]


@pytest.mark.parametrize("block", [gelu_block, Cell, nn.MultiheadAttention])
def test_autocast_has_the_same_gradients_and_moves_no_cast_of_a_weight(batch, block):
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            if block is nn.MultiheadAttention:
                for layer in model:
                    batch = layer(batch, batch, batch)[0]
                return batch.float().square().sum()
            return square_sum(model, batch).float()

    build = (
        functools.partial(nn.MultiheadAttention, 32, 4) if block is nn.MultiheadAttention else block
    )
    plain, model = twins(build, min_bytes=256)
    assert compare(record_step(plain, batch, loss), record_step(model, batch, loss)).bit_equal
    assert offload_report(model).skipped["cast of a parameter"][0] > 0
    loss(model, batch).backward(create_graph=False)


@pytest.mark.parametrize("inside", [True, False])
def test_offload_works_with_recompute_of_other_and_of_inner_blocks(batch, inside):
    def nested():
        return nn.Sequential(*[nn.Sequential(gelu_block(), gelu_block()) for _ in range(3)])

    torch.manual_seed(0)
    plain = nested()
    model = copy.deepcopy(plain)
    offload_blocks(model, blocks="[01]", keep_last=0)
    recompute_blocks(model, blocks=["0.*", "1.*"] if inside else "2", preserve_rng_state=False)
    assert compare(
        record_step(plain, batch, square_sum), record_step(model, batch, square_sum)
    ).bit_equal
    assert offload_report(model).num_moved == (
        4 if inside else 8
    )  # the inputs of the recomputed blocks
