"""Tests of recompute; torch and pytest are all they need.

The recomputed step is the same arithmetic, so everything is compared bit for bit.
"""

import contextlib
import copy
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curry_train.primitives.recompute import (
    Recompute,
    plain_blocks,
    recompute_blocks,
    remove_recompute,
)

# Calls of each block, outside of it: recompute restores a block's own attributes.
CALLS = Counter()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        CALLS[self] += 1
        hidden = nn.functional.dropout(self.up(self.norm(x)).sigmoid(), 0.2, self.training)
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class AliveStorages(TorchDispatchMode):
    """Follow the storages that operations make, to count the bytes that outlive a forward."""

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.storages.add(leaf.untyped_storage())
        return output

    def num_bytes(self):
        return sum(storage.nbytes() for storage in self.storages)


def train_step(change=None, batch_size=32):
    """Run one step; return the model, loss, gradients, buffers, random state and held bytes."""
    torch.manual_seed(0)
    model = Model()
    batch = torch.randn(batch_size, 16)
    names = change(model) if change else []
    with AliveStorages() as storages:
        loss = model(batch)
        held_bytes = storages.num_bytes()
    loss.backward()
    results = [loss, torch.get_rng_state(), *(p.grad for p in model.parameters()), *model.buffers()]
    return model, names, results, held_bytes


def test_the_step_is_the_same_bit_for_bit_and_holds_fewer_bytes():
    _, _, plain, plain_bytes = train_step()
    model, names, ours, held_bytes = train_step(recompute_blocks)
    assert names
    assert all(map(torch.equal, plain, ours))
    calls = {f"layers.{index}": CALLS[layer] for index, layer in enumerate(model.layers)}
    assert calls == {name: 2 if name in names else 1 for name in calls}
    assert all(layer.steps == 1 for layer in model.layers)
    freed = len(names) / len(model.layers)
    assert held_bytes < (1 - 0.7 * freed) * plain_bytes


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad, plain_blocks])
def test_nothing_is_recomputed_in_eval_without_grad_or_in_plain_blocks(around):
    model = Model()
    recompute_blocks(model)
    model.train(around is not contextlib.nullcontext)
    with around():
        loss = model(torch.randn(8, 16))
    if loss.requires_grad:
        loss.backward()
    assert [CALLS[layer] for layer in model.layers] == [1] * 4


def test_a_plain_function_recomputes_and_its_modules_move_their_state_once():
    torch.manual_seed(0)
    plain = Block()
    block = copy.deepcopy(plain)
    batch = torch.randn(8, 16)
    for run in (plain, Recompute(lambda x: block(x))):
        torch.manual_seed(1)
        run(batch).square().sum().backward()
    assert (CALLS[plain], CALLS[block], block.steps) == (1, 2, 1)
    found = [[*(p.grad for p in one.parameters()), *one.buffers()] for one in (plain, block)]
    assert all(map(torch.equal, *found))


def without_counts(model):
    for layer in model.layers:
        layer.norm.num_batches_tracked = None
    return []


def test_norms_that_count_no_batches_are_the_same_bit_for_bit():
    plain = train_step(without_counts)[2]
    ours = train_step(lambda model: without_counts(model) + recompute_blocks(model))[2]
    assert all(map(torch.equal, plain, ours))


def test_layers_that_get_their_size_in_the_first_call_may_be_inside():
    found = []
    for change in (lambda block: block, Recompute):
        torch.manual_seed(0)
        block = change(nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh()))
        block(torch.ones(4, 3).cumsum(0)).square().sum().backward()
        found.append([*(p.grad for p in block.parameters()), *block.buffers()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_error_in_a_block_stays_what_it_is(use_reentrant):
    call = Recompute(lambda x: x.item() // 0, use_reentrant=use_reentrant)
    with pytest.raises(ZeroDivisionError):
        call(torch.ones(1, requires_grad=True))


def test_names_weights_copies_and_removal_are_those_of_the_plain_model():
    model = Model()
    names = list(model.state_dict())
    assert recompute_blocks(model, blocks="layers.[01]") == ["layers.0", "layers.1"]
    assert list(model.state_dict()) == names
    assert isinstance(copy.deepcopy(model).layers[0], Recompute)
    assert remove_recompute(model) == ["layers.0", "layers.1"]
    assert all(type(layer) is Block for layer in model.layers)


def test_a_weight_that_changes_between_forward_and_backward_is_an_error():
    model = Model()
    recompute_blocks(model)
    loss = model(torch.randn(8, 16))
    with torch.no_grad():
        model.layers[1].down.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"bias of Linear was changed in place"):
        loss.backward()


def test_what_can_not_work_is_refused():
    model = Model()
    recompute_blocks(model)
    with pytest.raises(ValueError, match="wrapped already"):
        recompute_blocks(model)
    with pytest.raises(ValueError, match="no_such_layer"):
        recompute_blocks(Model(), blocks="no_such_layer.*")
