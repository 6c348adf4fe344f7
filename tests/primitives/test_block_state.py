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
@pytest.mark.parametrize(
    "kept_as", [nn.Module.register_buffer, nn.Module.register_parameter, setattr]
)
def test_a_changed_parameter_buffer_or_attribute_is_named(lever, kept_as):
    class Scaled(Block):
        def __init__(self):
            super().__init__()
            scale = torch.ones(8)
            if kept_as is nn.Module.register_parameter:
                scale = nn.Parameter(scale)
            kept_as(self, "scale", scale)

        def forward(self, x):
            return super().forward(x) * self.scale

    _, model = pair(lever, Scaled)
    loss = loss_of(model(X))
    with torch.no_grad():
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


@pytest.mark.parametrize("lever", RECOMPUTING)
def test_state_is_updated_once_and_recompute_sees_that_of_the_first_call(lever):
    found = []
    states = []
    for model in pair(lever, Counting):
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            # Two microbatches, whose forwards both run before the first backward.
            losses = [loss_of(model(X * scale)) for scale in (1, 2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
        found.append([parameter.grad for parameter in model.parameters()])
        states.append([vars(layer) for layer in model.layers])
    assert all(map(torch.equal, *found))
    for plain, ours in zip(*states, strict=True):
        for name in ("mean", "last", "total", "noise"):
            assert torch.equal(plain[name], ours[name])
        for name in ("calls", "seen", "facts", "recent"):
            assert plain[name] == ours[name]
