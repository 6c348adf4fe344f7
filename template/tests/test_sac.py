"""Tests of selective activation checkpointing; torch and pytest are all they need.

Recomputed operations are the same arithmetic, so everything is compared bit for bit.
"""

import functools
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curry_train.primitives.sac import apply_sac, remove_sac


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 64)
        self.third = nn.Linear(64, 16)

    def forward(self, x):
        hidden = nn.functional.gelu(self.first(self.norm(x)))
        hidden = nn.functional.dropout(self.second(hidden), 0.2, self.training).tanh()
        return x + self.third(hidden).sigmoid()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
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


def train_step(*policy):
    """Run one step; return the results, the operations that ran, and the held bytes."""
    torch.manual_seed(0)
    model = Model()
    batch = torch.randn(32, 16)
    if policy:
        assert apply_sac(model, *policy) == ["layers.0", "layers.1", "layers.2"]
    with Recorder() as recorder:
        loss = model(batch)
        held_bytes = recorder.num_bytes()
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss, torch.get_rng_state(), *gradients], recorder.calls, held_bytes


aten = torch.ops.aten


def policy_of_torch(context, operation, *args, **kwargs):
    if operation == aten.addmm.default:
        return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("policy", "saved_per_block"),
    [
        ("save_expensive", 3),
        ("every_second_matmul", 2),
        (["aten.mm", "aten.addmm"], 3),
        (lambda context, operation, *args, **kwargs: operation == aten.addmm.default, 3),
        (policy_of_torch, 3),
    ],
)
def test_the_step_is_bit_equal_and_products_run_again_as_the_policy_says(policy, saved_per_block):
    plain, plain_calls, plain_bytes = train_step()
    ours, calls, held_bytes = train_step(policy)
    assert all(map(torch.equal, plain, ours))
    num_again = calls[aten.addmm.default] - plain_calls[aten.addmm.default]
    assert num_again == (3 - saved_per_block) * 3
    assert calls[aten.gelu.default] == 2 * plain_calls[aten.gelu.default]
    assert held_bytes < 0.8 * plain_bytes


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_nothing_is_recomputed_without_training(mode):
    model = Model()
    apply_sac(model)
    model.train(mode != "eval")
    with torch.set_grad_enabled(mode != "no_grad"), Recorder() as recorder:
        loss = model(torch.randn(8, 16))
        if loss.requires_grad:
            loss.backward()
    assert recorder.calls[aten.gelu.default] == 3


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (["aten.linear"], "^policy 'the list' saves no output of layers.0, so the block would be"),
        (functools.partial(lambda *_, **__: False), r"^policy 'partial' saves no output"),
        (["aten.gelu", "aten.tanh", "aten.native_layer_norm"], "wrong way round"),
        (
            lambda *_, **__: torch.utils.checkpoint.CheckpointPolicy.MUST_CPU_OFFLOAD,
            r"^policy '<lambda>' returns MUST_CPU_OFFLOAD for aten.\S+, which torch silently "
            "treats as recompute; use offload_blocks to move activations to the CPU$",
        ),
        ("save_matmul", "^no policy is called 'save_matmul'; there are save_expensive, "),
        (
            ["mm"],
            "^an operation is named as torch.ops.aten.mm or 'aten.mm', got 'mm'$",
        ),
    ],
)
def test_useless_policies_are_refused(policy, message):
    def train():
        model = Model()
        apply_sac(model, policy)
        model(torch.randn(8, 16))

    with pytest.raises(ValueError, match=message):
        train()


def test_a_third_of_the_cheap_outputs_may_be_saved_alone():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sigmoid(), nn.SiLU()))
    (plain,) = torch.autograd.grad(model(torch.ones(2, 8)).sum(), model[0][0].weight)
    apply_sac(model, ["aten.tanh"], blocks="0")
    (ours,) = torch.autograd.grad(model(torch.ones(2, 8)).sum(), model[0][0].weight)
    assert torch.equal(plain, ours)


def test_a_saved_output_that_is_written_in_place_is_an_error():
    model = Model()
    apply_sac(model)
    model.layers[1].second.register_forward_hook(lambda *call: call[-1].mul_(2))
    loss = model(torch.randn(8, 16))
    with pytest.raises(RuntimeError, match="has been mutated"):
        loss.backward()


def test_names_stay_and_removal_restores_the_model():
    model = Model()
    names = list(model.state_dict())
    assert apply_sac(model, blocks="layers.[02]") == ["layers.0", "layers.2"]
    assert list(model.state_dict()) == names
    assert remove_sac(model) == ["layers.0", "layers.2"]
    assert all(type(layer) is Block for layer in model.layers)
