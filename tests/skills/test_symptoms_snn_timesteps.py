"""Symptoms of chunked timesteps: reproduced, cured, and not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_snn_timesteps.py
"""

import pytest
import torch
from snn_models import WIDTH, Keeper, KeeperNet, Net, build, currents
from symptoms import symptom
from torch import nn
from torch.utils.checkpoint import checkpoint

from curry_train.core.measure import measure_memory
from curry_train.core.parity import compare, record
from curry_train.primitives.recompute import recompute_blocks
from curry_train.primitives.snn_timesteps import (
    HiddenState,
    checkpoint_timesteps,
    recompute_timesteps,
    run_timesteps,
)

STEPS = 40


@pytest.fixture
def x():
    return currents(STEPS)


def trained(module, loss, x):
    """Return the loss, gradients and buffers of one step."""
    value = loss(module, x)
    value.backward()
    return record(module, value.detach())


def peak(module, loss, x):
    loss(module, x[:3])  # the first call looks for hidden state and measures
    return measure_memory(module, x, loss).peak_bytes


def rate(loop=run_timesteps, **kept):
    """Return a loss of a network's firing rates."""

    def loss(module, x):
        made, _ = loop(module.step, x, module.initial_state(x), outputs="mean", **kept)
        return made.square().sum()

    return loss


def chunked_rate(**kept):
    return rate(checkpoint_timesteps, **kept)


class Handed(KeeperNet):
    """A network of the same neurons, whose step sets and returns their potentials."""

    def initial_state(self, x):
        return x.new_zeros(x.shape[1], WIDTH), x.new_zeros(x.shape[1], WIDTH)

    def step(self, x, state):
        keepers = [layer for layer in self.layers if isinstance(layer, Keeper)]
        for keeper, potential in zip(keepers, state, strict=True):
            keeper.v = potential
        return self.layers(x), tuple(keeper.v for keeper in keepers)


def plain_keepers(module, x):
    module.reset()
    return sum(module.step(entry, None)[0] for entry in x).div(STEPS).square().sum()


def naive_chunks(module, x, *, reset=False):
    """Wrap chunks of five timesteps in torch's checkpoint, as scripts do."""
    module.reset()

    def run(chunk, total):
        if reset:
            module.reset()
        for entry in chunk:
            total = total + module.step(entry, None)[0]
        return total

    total = torch.zeros(4, WIDTH)
    for chunk in x.split(5):
        total = checkpoint(run, chunk, total, use_reentrant=False)
    return total.div(STEPS).square().sum()


@symptom("`HiddenState`: ... it keeps state outside of its modules")
@symptom("gradients are off by some percent with chunks, and no error")
def test_a_neuron_may_store_its_potential_in_itself_but_not_in_a_variable(x):
    reference, refused = trained(build(KeeperNet), plain_keepers, x), build(KeeperNet)
    potential = [torch.zeros(4, WIDTH)]

    def step(x, state):
        potential[0] = 0.9 * potential[0] + refused.layers[0](x)
        return torch.tanh(potential[0]), state

    with pytest.raises(HiddenState, match="it keeps state outside of its modules"):
        checkpoint_timesteps(step, x, None)
    found = trained(build(KeeperNet), naive_chunks, x)
    assert torch.equal(found.loss, reference.loss)
    assert compare(reference, found).worst > 0.01
    forgetful = trained(build(KeeperNet), lambda module, x: naive_chunks(module, x, reset=True), x)
    assert not torch.equal(forgetful.loss, reference.loss)  # repeatable, but a different network
    for levels in (1, 2):

        def keepers(module, x, levels=levels):
            module.reset()
            options = {"outputs": "mean", "levels": levels}
            return checkpoint_timesteps(module.step, x, None, **options)[0].square().sum()

        for make, loss in ((KeeperNet, keepers), (Handed, chunked_rate(levels=levels))):
            assert compare(reference, trained(build(make), loss, x)).bit_equal


@symptom("`ValueError`: step writes into the state that it is given")
def test_a_step_that_writes_into_its_state_is_refused(x):
    class InPlace(Net):
        def step(self, x, state):
            state[0].mul_(0.9).add_(self.first(x))
            return torch.tanh(self.last(torch.tanh(state[0]))), state

    class Anew(InPlace):
        def step(self, x, state):
            first = 0.9 * state[0] + self.first(x)
            return torch.tanh(self.last(torch.tanh(first))), (first, state[1])

    def through_torch(module, x):
        state, total = module.initial_state(x), 0
        for entry in x:
            out, state = checkpoint(module.step, entry, state, use_reentrant=False)
            total = total + out
        return total.div(STEPS).square().sum()

    for loss in (chunked_rate(), lambda module, x: chunked_rate()(module, x.clone())):
        with pytest.raises(ValueError, match="step writes into the state that it is given"):
            trained(build(InPlace), loss, x)
    reference = trained(build(Anew), rate(), x)
    assert compare(reference, trained(build(Anew), chunked_rate(), x)).bit_equal
    unchecked = trained(build(InPlace), through_torch, x)  # torch raises no error
    assert torch.equal(unchecked.loss, reference.loss)
    assert compare(reference, unchecked).worst > 0.1


@symptom("memory still grows with the number of timesteps")
def test_a_mean_computed_in_the_loop_holds_less_than_stacked_outputs():
    def stacked(**kept):
        def loss(module, x):
            made, _ = checkpoint_timesteps(module.step, x, module.initial_state(x), **kept)
            return made.mean(0).square().sum()

        return loss

    x = currents(STEPS, 64)
    peaks = [peak(build(), loss, x) for loss in (stacked(), stacked(chunk_size=2), chunked_rate())]
    assert peaks[2] < 0.5 * min(peaks[:2])
    long, twice = currents(2 * STEPS, 64), 2 * STEPS * 64 * WIDTH * 4
    assert peak(build(), stacked(), long) - peaks[0] > twice  # T outputs, and their stack
    assert peak(build(), chunked_rate(), long) < 1.45 * peaks[2]  # the root of two


class Loop(nn.Module):
    """A model with a loop in forward, as scripts have it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.blocks = nn.ModuleList([nn.Sequential(layer, nn.Tanh()) for layer in self.layers])

    def step(self, x, state):
        for block in self.blocks:
            x = block(x)
        return torch.tanh(x + state), torch.tanh(0.9 * state + x)

    def forward(self, x):
        state, total = torch.zeros_like(x[0]), 0
        for entry in x:
            out, state = self.step(entry, state)
            total = total + out
        return total


class OneLine(Loop):
    def forward(self, x):
        return checkpoint_timesteps(self.step, x, torch.zeros_like(x[0]), outputs="sum")[0]


class OneMethod(Loop):
    unroll = staticmethod(run_timesteps)

    def forward(self, x):
        return self.unroll(self.step, x, torch.zeros_like(x[0]), outputs="sum")[0]


@symptom("`ValueError`: ... has no method unroll")
def test_a_loop_in_forward_becomes_one_line():
    def loss(module, x):
        return module(x).square().sum()

    x = currents(STEPS, 64)
    with pytest.raises(ValueError, match="Loop has no method unroll"):
        recompute_timesteps(build(Loop))
    reference, plain = trained(build(Loop), loss, x), peak(build(Loop), loss, x)
    by_block, method = build(Loop), build(OneMethod)
    recompute_blocks(
        by_block, blocks="blocks.*"
    )  # holds the input of every block at every timestep
    assert peak(by_block, loss, x) > 0.7 * plain
    recompute_timesteps(method)
    for module in (build(OneLine), method):
        assert compare(reference, trained(module, loss, x)).bit_equal
        assert peak(module, loss, x) < 0.45 * plain


@symptom("`must match the size`, or samples and timesteps trade places")
def test_a_wrong_time_dimension_steps_through_the_samples():
    module, x = build(), currents(10, 4)
    batch_first = x.transpose(0, 1)
    state = module.initial_state(x)
    wanted, _ = run_timesteps(module.step, x, state)
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        checkpoint_timesteps(module.step, batch_first, state)
    assert "is time_dim right?" in raised.value.__notes__[0]
    cropped, _ = checkpoint_timesteps(
        module.step, batch_first[:, :4], state
    )  # without an error it steps through the samples
    assert not torch.equal(cropped, wanted[:4])
    assert not torch.equal(cropped.transpose(0, 1), wanted[:4])
    found, _ = checkpoint_timesteps(module.step, batch_first, state, time_dim=1)
    assert torch.equal(found.transpose(0, 1), wanted)
