"""Tests of policies and regions: what runs again, what is freed, and how to undo both.

python -m pytest tests/primitives/test_policies.py
"""

import copy
import functools
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from curry_train.core.measure import measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.primitives.regions import apply_regions
from curry_train.primitives.sac import Policy, apply_sac

aten = torch.ops.aten
WIDTH = 256
BATCH = torch.ones(64, WIDTH)
# By a part of the operation's name.
COUNTED = {
    "aten.mm.": "product",
    "scaled_dot_product": "attention",
    "aten.sin.": "sine",
    "aten.tanh.": "tanh",
    "aten.rand_like.": "noise",
    "aten.add_.": "sum",
    "aten.native_layer_norm.": "norm",
}


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts.update(kind for text, kind in COUNTED.items() if text in str(func))
        return func(*args, **(kwargs or {}))


def operations_of(model, batch):
    """Count the operations of a step without early stop."""
    model.zero_grad()
    with set_checkpoint_early_stop(False), Operations() as operations:
        model(batch).sum().backward()
    return operations.counts


def stack(block, num_blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(num_blocks)])


# Policies.


class Attending(nn.Module):
    """Three products, and around them a sine, a tanh, noise, a sum in place and attention."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))

    def forward(self, x):
        first, second, third = self.weights
        drawn = torch.tanh(x.sin() @ first) * torch.rand_like(x)
        drawn.add_(1.0)
        heads = (drawn @ second).view(1, 2, 4, 8)
        return F.scaled_dot_product_attention(heads, heads, heads).view(8, 8) @ third


def starts_with(names, context, operation, *args, **kwargs):
    return str(operation).startswith(names)


def keep(*names):
    return functools.partial(starts_with, tuple(f"aten.{name}." for name in names))


def calls(*chosen):
    return Policy("by place", calls=frozenset(chosen))


# What is cheap runs again once, unless a policy keeps it. Noise is drawn again, and a sum in place
# is made again with what it is added to, whatever the policy.
CHEAP = {"sine": 1, "tanh": 1, "noise": 1, "sum": 1}


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("save_expensive", {}),
        ("save_matmuls", {"attention": 1}),
        ("save_attention", {"product": 3}),
        ("save_matmuls_and_attention", {}),
        ("every_second_matmul", {"product": 1}),
        (["aten.mm.default", aten.tanh], {"attention": 1, "tanh": 0}),
        (keep("tanh", "mm", "rand_like"), {"attention": 1, "tanh": 0}),
        # A third of what is cheap may be kept without a product, and more with one.
        (keep("tanh"), {"product": 3, "attention": 1, "tanh": 0}),
        (calls(("matmul", 1), ("attention", 0)), {"product": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_exactly_what_a_policy_leaves_out_runs_again_in_copies_too(policy, again):
    x = torch.ones(8, 8)
    model = stack(Attending)
    plain = operations_of(model, x)
    assert apply_sac(model, policy, blocks=["1", "2"]) == ["1", "2"]
    expected = Counter({kind: 2 * number for kind, number in (CHEAP | again).items()})
    for changed in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert operations_of(changed, x) - plain == +expected


# Regions.


class Chain(nn.Module):
    """A product, whose output is multiplied by some weights in a row."""

    def __init__(self, length):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.ParameterList(torch.ones(WIDTH) for _ in range(length))

    def forward(self, x):
        return functools.reduce(torch.mul, self.weights, self.linear(x))


class ReadThrice(nn.Module):
    """A norm that three products read, two of which are multiplied."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        normed = self.norm(x)
        first, second, third = (layer(normed) for layer in self.layers)
        return x + F.silu(first) * second + third


def total(model, batch):
    return model(batch).float().sum()


def total_by_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return total(model, batch)


# Three blocks keep so many float32 tensors of the batch's size. A chain keeps its product and
# every fifth factor, and a block the input that the one before it computed. Under autocast the
# first block keeps its cast batch too, which nothing can compute again.
@pytest.mark.parametrize(
    ("block", "loss", "num_tensors"),
    [
        (functools.partial(Chain, 5), total_by_autocast, 1.5 + 1 + 0.5),
        (functools.partial(Chain, 6), total, 3 + 3),
        (ReadThrice, total, 2 + 6),
        (ReadThrice, total_by_autocast, 2 + 3),
    ],
)
def test_regions_hold_what_a_count_by_hand_gives(block, loss, num_tensors):
    model = stack(block)
    apply_regions(model)
    held = measure_memory(model, BATCH, loss).held_bytes / BATCH.nbytes
    assert round(held, 1) == num_tensors


class Returning(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output(x)


class Between(nn.Module):
    """A module between two products that returns its values in another form."""

    def __init__(self, output):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.act = Returning(output)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        output = self.act(x)
        return x + self.last(output[0] if isinstance(output, tuple) else output)


OUTPUTS = {
    "its input": lambda x: x,
    "a view": lambda x: torch.sigmoid(x).view(-1, 2, WIDTH // 2).flatten(1),
    "a pair": lambda x: (torch.sigmoid(x), None),
    "no gradient": lambda x: torch.sigmoid(x.detach()),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_named_module_may_return_its_values_in_any_form(output):
    plain, changed = (stack(lambda: Between(OUTPUTS[output])) for _ in range(2))
    apply_regions(changed, also=["*.act"])
    steps = [record_step(model, BATCH, total) for model in (plain, changed)]
    assert compare(*steps).bit_equal
