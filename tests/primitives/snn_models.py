"""Small spiking networks for tests of chunked timesteps, some with hidden state.

Proof: `python -m pytest tests/primitives/test_snn_timesteps_contract.py`.
"""

import torch
from torch import nn

from curry_train.core.generators import seeded
from curry_train.core.parity import compare, record
from curry_train.primitives import checkpoint_timesteps, run_timesteps
from curry_train.workloads.models import SurrogateSpike

from ..toy_steps import all_equal, drawn

WIDTH = 6


class Neuron(nn.Module):
    """A leaky integrate-and-fire neuron that takes and returns its potential."""

    def forward(self, x, potential):
        potential = 0.9 * potential + x
        spikes = SurrogateSpike.apply(potential - 1.0)
        return spikes, potential - spikes


class Keeper(Neuron):
    """The same neuron with the potential stored inside, as in spikingjelly."""

    def __init__(self):
        super().__init__()
        self.v = 0.0

    def forward(self, x):
        spikes, self.v = super().forward(x, self.v)
        return spikes


class Net(nn.Module):
    """A network of two linear layers with neurons, and an optional module between them."""

    def __init__(self, between=nn.Identity):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = between()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.neuron = Neuron()

    def initial_state(self, x):
        return x.new_zeros(x.shape[1], WIDTH), x.new_zeros(x.shape[1], WIDTH)

    def step(self, x, state):
        first, last = state
        spikes, first = self.neuron(self.first(x), first)
        spikes, last = self.neuron(self.last(self.between(spikes)), last)
        return spikes + 0.1 * last, (first, last)


def build(make=Net):
    """Build with the same weights each time, large enough for spikes."""
    torch.manual_seed(0)
    module = make().train()
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(3)
    return module


def currents(steps=10, batch=4):
    """Make inputs with time as the first dimension."""
    return drawn(steps, batch, WIDTH)


def trained(module, loop, x, **kept):
    """Train one step; return its record and the gradients of input and initial state."""
    x = x.clone().requires_grad_()
    state = [part.requires_grad_() for part in module.initial_state(x)]
    module.zero_grad()
    with seeded(3):
        outputs, after = loop(module.step, x, tuple(state), **kept)
        loss = outputs.square().sum() + sum(part.square().sum() for part in after)
        loss.backward()
        return record(module, loss.detach()), [x.grad, *(part.grad for part in state)]


def same(make, x, **kept):
    """Return whether chunks equal the plain loop on two modules of the same weights."""
    plain, gradients = trained(build(make), run_timesteps, x)
    ours, found = trained(build(make), checkpoint_timesteps, x, **kept)
    return compare(plain, ours).bit_equal and all_equal(gradients, found)
