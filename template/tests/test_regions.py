"""Tests of regions, which recompute norms and activations; they need torch and pytest.

Recomputed operations are the same arithmetic, so everything is compared bit for bit.
"""

import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curry_train.primitives.regions import _is_norm, apply_regions, remove_regions

aten = torch.ops.aten


class Snake(nn.Module):
    def forward(self, x, *, power):
        return x + torch.sin(x).pow(power)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate = nn.Linear(16, 64)
        self.up = nn.Linear(16, 64)
        self.snake = Snake()
        self.down = nn.Linear(64, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, *, power):
        normed = self.norm(x)
        hidden = nn.functional.gelu(self.gate(normed)) * self.snake(self.up(normed), power=power)
        return x + self.drop(self.down(hidden))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, power=2)
        return x.square().mean()


class Recorder(TorchDispatchMode):
    """Count operations, and the bytes of the storages that they make and that still live."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.storages.add(leaf.untyped_storage())
        return output

    def num_bytes(self):
        return sum(storage.nbytes() for storage in self.storages)


def train_step(**regions):
    """Run one step; return the results, the operations that ran, and the held bytes."""
    torch.manual_seed(0)
    model = Model()
    batch = torch.randn(32, 16)
    if regions:
        assert apply_regions(model, **regions) == ["layers.0", "layers.1", "layers.2"]
    with Recorder() as recorder:
        loss = model(batch)
        held_bytes = recorder.num_bytes()
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss, torch.get_rng_state(), *gradients], recorder.calls, held_bytes


# Of the held bytes without regions: a block's hidden tensors are two inputs of its activations,
# two results, their product, and what `Snake` saves.
@pytest.mark.parametrize(("also", "most_share"), [((), 0.8), (("*.snake",), 0.6), ("*.snake", 0.6)])
def test_the_step_is_bit_equal_holds_fewer_bytes_and_runs_no_product_again(also, most_share):
    plain, plain_calls, plain_bytes = train_step()
    ours, calls, held_bytes = train_step(blocks="layers.?", also=also)
    assert all(map(torch.equal, plain, ours))
    assert held_bytes < most_share * plain_bytes
    for product in (aten.addmm.default, aten.mm.default):
        assert calls[product] == plain_calls[product]
    assert calls[aten.native_layer_norm.default] == 2 * plain_calls[aten.native_layer_norm.default]


def test_a_graph_that_is_kept_holds_no_more_after_a_backward():
    model = Model()
    apply_regions(model, also="*.snake")
    with Recorder() as recorder:
        loss = model(torch.randn(32, 16))
        held_bytes = recorder.num_bytes()
        for _ in range(2):
            loss.backward(retain_graph=True)
            model.zero_grad()
            # A few statistics of norms stay.
            assert recorder.num_bytes() < 1.05 * held_bytes


def test_nothing_is_recomputed_in_eval_mode():
    calls = []
    for has_regions in (False, True):
        model = Model().eval()
        if has_regions:
            apply_regions(model)
        with Recorder() as recorder:
            model(torch.randn(8, 16)).backward()
        calls.append(recorder.calls)
    assert calls[0] == calls[1]


def test_a_saved_tensor_that_is_written_in_place_is_an_error():
    model = Model()
    apply_regions(model)
    written = []
    model.layers[1].gate.register_forward_hook(lambda module, args, output: written.append(output))
    loss = model(torch.randn(8, 16))
    with torch.no_grad():
        written[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_useless_and_unsafe_regions_are_refused():
    with pytest.raises(ValueError, match=r"^also .no_such_module"):
        apply_regions(Model(), also=["no_such_module"])
    drawing = Model()
    apply_regions(drawing, also=["*.drop"])
    with pytest.raises(
        ValueError,
        match=r"draws random numbers, and would draw different ones the second time: leave it "
        "out of also$",
    ):
        drawing(torch.randn(8, 16))


def test_removal_restores_the_model():
    model = Model()
    apply_regions(model)
    assert remove_regions(model) == ["layers.0", "layers.1", "layers.2"]
    assert all(type(layer) is Block for layer in model.layers)


def test_a_norm_that_two_blocks_share_is_put_back():
    norm = nn.LayerNorm(8)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm) for _ in range(2)))
    apply_regions(model)
    remove_regions(model)
    assert type(norm) is nn.LayerNorm


@pytest.mark.parametrize(
    ("held", "is_norm"),
    [
        (nn.Parameter(torch.ones(4)), True),
        (nn.Parameter(torch.ones(4, 4)), False),
        (nn.Buffer(torch.ones(4)), False),
        (nn.Tanh(), False),
    ],
)
def test_norms_of_others_are_known_by_their_name_and_hold_vectors_alone(held, is_norm):
    module = type("TheirNorm", (nn.Module,), {})()
    module.held = held
    assert _is_norm(module) is is_norm
