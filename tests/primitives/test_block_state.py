"""A block that runs again reads the state of its first call, or an error names what changed.

python -m pytest tests/primitives/test_block_state.py
"""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

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


@pytest.mark.parametrize("lever", LEVERS)
def test_functional_call_with_other_weights_gets_their_gradients(lever):
    found = []
    for model in pair(lever):
        weights = {
            name: (value.detach() * 1.5 + 0.1).requires_grad_()
            for name, value in model.named_parameters()
        }
        loss_of(functional_call(model, weights, (X,))).backward()
        found.append([weight.grad for weight in weights.values()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("lever", LEVERS)
def test_recompute_uses_the_weights_of_the_forward_if_they_were_replaced_since(lever):
    found = []
    for model in pair(lever):
        first = list(model.parameters())
        output = model(X)
        for module in model.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(value.detach() * 3 + 1))
        loss_of(output).backward()
        found.append([parameter.grad for parameter in first])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("lever", LEVERS)
def test_an_optimizer_step_between_two_backwards_is_refused_as_in_plain_torch(lever):
    for model in pair(lever):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = loss_of(model(X))
        second = loss_of(model(X * 2))
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|was changed in place"):
            second.backward()


class WithoutGate(Block):
    def __init__(self):
        super().__init__()
        self.register_parameter("gate", None)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return super().forward(x * self.scale)


@pytest.mark.parametrize("lever", RECOMPUTING)
def test_a_parameter_after_one_that_is_none_is_compared_too(lever):
    _, model = pair(lever, WithoutGate)
    loss = loss_of(model(X))
    with torch.no_grad():
        model.layers[0].scale.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|was changed in place"):
        loss.backward()


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


@pytest.mark.parametrize("lever", LEVERS)
def test_an_optimizer_step_after_backward_is_accepted(lever):
    found = []
    for model in pair(lever):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            for scale in (1, 2):
                loss_of(model(X * scale)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


class Dropping(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x))


@pytest.mark.parametrize("lever", LEVERS)
def test_eval_between_forward_and_backward_does_not_change_the_recomputation(lever):
    found = []
    for model in pair(lever, Dropping):
        torch.manual_seed(3)
        loss = loss_of(model(X))
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


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


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.batch_norm(super().forward(x))


class Spectral(Block):
    def __init__(self):
        super().__init__()
        self.linear = spectral_norm(self.linear)


def state_of(model):
    """Return all plain attributes and buffers, for a comparison."""
    found = [*model.buffers()]
    for layer in model.layers:
        if isinstance(layer, Counting):
            found += [layer.mean, layer.last, layer.total, layer.noise]
            found += map(torch.tensor, (layer.seen, [*layer.recent]))
            found.append(torch.tensor([layer.calls, layer.facts["rows"]]))
    return found


@pytest.mark.parametrize("block", [Counting, Written, Normed, Spectral])
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


@pytest.mark.parametrize("lever", ["recompute", "segments"])
def test_double_backward_sees_the_first_state_each_time(lever):
    found = []
    for model in pair(lever, Written):
        loss = loss_of(model(X))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        found.append(list(model.buffers()))
    assert all(map(torch.equal, found[0], found[2]))
    assert all(map(torch.equal, found[1], found[3]))


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
