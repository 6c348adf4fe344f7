"""Tests of offload; torch and pytest are all they need.

Offload moves bytes and computes nothing, so everything is compared bit for bit. On a CPU the host
copy is in the same memory as the original; the tests check that the original is freed.
"""

import sys
import weakref

import pytest
import torch
from torch import nn

from curry_train.primitives.offload import (
    HostMemoryShort,
    offload_blocks,
    offload_report,
    remove_offload,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.hidden = None

    def forward(self, x, *, scale):
        hidden = nn.functional.dropout(self.up(x).sigmoid(), 0.2, self.training)
        self.hidden = weakref.ref(hidden.untyped_storage())
        return x + scale * self.down(hidden)


class Model(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.square().mean()

    def held(self):
        """Return for each block whether the activation for its backward is on the device."""
        return [layer.hidden() is not None for layer in self.layers]


def train_step(change=None):
    torch.manual_seed(0)
    model = Model()
    batch = torch.randn(32, 16)
    if change is not None:
        change(model)
    loss = model(batch)
    held = model.held()
    loss.backward()
    return model, held, [loss, torch.get_rng_state(), *(p.grad for p in model.parameters())]


def test_the_step_is_bit_equal_and_offloaded_activations_leave_the_device():
    _, plain_held, plain = train_step()
    model, held, ours = train_step(offload_blocks)
    assert plain_held == [True] * 4
    assert held == [False, False, False, True]  # backward starts with the last block
    assert all(map(torch.equal, plain, ours))
    report = offload_report(model)
    assert report.moved_bytes == report.brought_back_bytes
    # At least the hidden tensors of three blocks: 32 rows of 64 numbers.
    assert report.moved_bytes >= 3 * 32 * 64 * 4


def test_small_tensors_and_parameters_stay():
    model, held, _ = train_step(lambda model: offload_blocks(model, min_bytes=2**20))
    assert held == [True] * 4
    assert offload_report(model).moved_bytes == 0


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_nothing_moves_without_training(mode):
    model = Model()
    offload_blocks(model)
    model.train(mode != "eval")
    with torch.set_grad_enabled(mode != "no_grad"):
        model(torch.randn(32, 16))
    assert offload_report(model).moved_bytes == 0


class Doubling(nn.Module):
    """A block that overwrites a tensor which backward needs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        saved = self.linear(x).exp()
        result = saved.sin()
        with torch.no_grad():
            saved.mul_(2)
        return result


def test_a_saved_tensor_that_is_written_in_place_is_an_error():
    model = nn.Sequential(Doubling(), nn.Linear(16, 16))
    offload_blocks(model, blocks=["0", "1"], min_bytes=0)
    loss = model(torch.randn(32, 16)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_blocks_are_offloaded_once_and_removal_makes_them_as_they_were():
    model = Model()
    names = offload_blocks(model)
    with pytest.raises(
        ValueError,
        match=r"^blocks of this model are offloaded already: call remove_offload.model. first$",
    ):
        offload_blocks(model, blocks="layers.3", keep_last=0)
    assert remove_offload(model) == names == ["layers.0", "layers.1", "layers.2"]
    assert all(type(layer) is Block for layer in model.layers)
    with pytest.raises(
        ValueError,
        match=r"^no block of this model is offloaded: call offload_blocks\(model\) first$",
    ):
        offload_report(model)


def test_too_little_host_memory_is_an_error_where_a_step_moves_more_than_any_before(monkeypatch):
    model = Model()
    offload_blocks(model)
    model(torch.randn(32, 16)).backward()
    module = sys.modules[HostMemoryShort.__module__]
    monkeypatch.setattr(module, "available_host_bytes", lambda: 6 * 1024)
    model(torch.randn(32, 16)).backward()  # no more bytes are needed
    with pytest.raises(
        HostMemoryShort, match=r"needs 0.0\d MiB more.*0.01 MiB is available: offload fewer blocks"
    ):
        model(torch.randn(128, 16))


def test_blocks_inside_torch_func_are_an_error_that_says_what_to_do():
    model = Model()
    offload_blocks(model)
    with pytest.raises(
        RuntimeError,
        match=r"^offloaded blocks can't run inside torch.func: call remove_offload\(model\) first$",
    ):
        torch.func.vmap(model)(torch.randn(3, 32, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 4}, "^keep_last=4 leaves none of the 4 blocks to offload: lower it$"),
        ({"keep_last": -1}, "^keep_last must be a whole number from 0 up, got -1$"),
        ({"min_bytes": -1}, "^min_bytes must be a whole number from 0 up, got -1$"),
        ({"blocks": "no_such_layer"}, "no_such_layer"),
    ],
)
def test_useless_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        offload_blocks(Model(), **options)
