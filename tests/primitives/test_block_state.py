"""A block that runs again reads the state of its first call, or an error names what changed.

python -m pytest tests/primitives/test_block_state.py
"""

import collections
import copy

import pytest
import torch
from torch import nn

from curry_train.primitives import (
    apply_regions,
    apply_sac,
    recompute_blocks,
    recompute_segments,
)

LEVERS = {
    "recompute": lambda model: recompute_blocks(model, blocks="layers.*"),
    "reentrant": lambda model: recompute_blocks(model, blocks="layers.*", use_reentrant=True),
    "sac": lambda model: apply_sac(model, "save_matmuls", blocks="layers.*"),
    "segments": lambda model: recompute_segments(model, 2, blocks="layers.*"),
    "regions": lambda model: apply_regions(model, blocks="layers.*"),
}
RECOMPUTING = [name for name in LEVERS if name != "regions"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self, block=Block, depth=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def pair(lever, block=Block):
    """Return the plain model, and one with the lever."""
    plain = Model(block)
    changed = copy.deepcopy(plain)
    LEVERS[lever](changed)
    return plain, changed


def loss_of(output):
    return output.square().sum()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("lever", RECOMPUTING)
def test_a_changed_parameter_is_named(lever):
    _, model = pair(lever)
    loss = loss_of(model(X))
    with torch.no_grad():
        model.layers[1].linear.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"linear\.bias .*was changed in place"):
        loss.backward()


@pytest.mark.parametrize("lever", RECOMPUTING)
@pytest.mark.parametrize("kept_as", [nn.Module.register_buffer, setattr])
def test_a_changed_buffer_or_attribute_is_named(lever, kept_as):
    class Scaled(Block):
        def __init__(self):
            super().__init__()
            kept_as(self, "scale", torch.ones(8))

        def forward(self, x):
            return super().forward(x) * self.scale

    _, model = pair(lever, Scaled)
    loss = loss_of(model(X))
    model.layers[0].scale.mul_(2)
    with pytest.raises(RuntimeError, match=r"scale .*was changed in place"):
        loss.backward()


class Counting(Block):
    """A block with state in plain attributes: numbers, tensors, containers, one made late."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.mean = torch.zeros(8)
        self.seen = []
        self.facts = {"rows": 0}
        self.total = torch.zeros(())
        self.recent = collections.deque(maxlen=2)

    def forward(self, x):
        self.calls += 1
        x = x - 0.1 * self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen.append(float(x.detach().mean()))
        self.facts["rows"] += len(x)
        self.last = x.detach()
        self.total += x.detach().mean()
        self.recent.append(self.calls)
        if not hasattr(self, "noise"):
            self.noise = torch.rand(8)
        factor = 1 + 0.01 * (self.calls + sum(self.recent))
        return super().forward(x) * factor + self.total * self.noise


class Written(Block):
    """A block with a buffer that it reads and then writes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = x - 0.1 * self.mean
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.steps += 1
        return super().forward(x)


def state_of(model):
    """Return all plain attributes and buffers, for a comparison."""
    found = [*model.buffers()]
    for layer in model.layers:
        if isinstance(layer, Counting):
            found += [layer.mean, layer.last, layer.total, layer.noise]
            found += map(torch.tensor, (layer.seen, [*layer.recent]))
            found.append(torch.tensor([layer.calls, layer.facts["rows"]]))
    return found


@pytest.mark.parametrize("block", [Counting, Written])
@pytest.mark.parametrize("lever", RECOMPUTING)
def test_state_is_updated_once_and_recompute_sees_that_of_the_first_call(lever, block):
    found = []
    states = []
    for model in pair(lever, block):
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            # Two microbatches, whose forwards both run before the first backward.
            losses = [loss_of(model(X * scale)) for scale in (1, 2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
        found.append([parameter.grad for parameter in model.parameters()])
        states.append(state_of(model))
    assert all(map(torch.equal, *found))
    assert all(map(torch.equal, *states))
    assert len(states[0]) == len(states[1])


class Lazy(Block):
    """A block whose layer has no weights before the first call, which is recomputed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.LazyLinear(8)


@pytest.mark.parametrize("lever", RECOMPUTING)
def test_a_layer_inside_a_block_may_get_its_weights_in_the_first_call(lever):
    model = Model(Lazy)
    LEVERS[lever](model)
    loss_of(model(X)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
