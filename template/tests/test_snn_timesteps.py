"""Tests of recompute over time; torch and pytest are all they need.

The loop is the same arithmetic in the same order, so everything is compared bit for bit.
"""

import functools
import itertools
import operator
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curry_train.primitives.snn_timesteps import (
    checkpoint_timesteps,
    run_timesteps,
)

STEPS = 24


class Neurons(nn.Module):
    """Leaky integrate-and-fire neurons with a smooth spike, dropout, and their state outside."""

    unroll = staticmethod(run_timesteps)

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 32)
        self.outer = nn.Linear(32, 4)

    def step(self, x, voltage):
        voltage = 0.9 * voltage + self.inner(nn.functional.dropout(x, 0.2, self.training))
        spikes = torch.sigmoid(5 * (voltage - 1))
        return self.outer(spikes), voltage - spikes

    def forward(self, inputs):
        outputs, voltage = self.unroll(self.step, inputs, torch.zeros(16, 32), outputs="mean")
        return outputs.square().mean() + voltage.mean()


class Recorder(TorchDispatchMode):
    """Count timesteps, and the bytes of the storages that operations make and that still live."""

    def __init__(self):
        super().__init__()
        self.num_timesteps = 0
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.num_timesteps += func is torch.ops.aten.sigmoid.default  # one per timestep
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.storages.add(leaf.untyped_storage())
        return output

    def num_bytes(self):
        return sum(storage.nbytes() for storage in self.storages)


def plain_loop(step, inputs, state):
    outputs = []
    for x in inputs:
        output, state = step(x, state)
        outputs.append(output)
    return torch.stack(outputs), state


def train_step(loop, **options):
    """Run the loop and its backward; return the results, the timesteps and the held bytes."""
    torch.manual_seed(0)
    model = Neurons()
    inputs = torch.randn(STEPS, 16, 8, requires_grad=True)
    state = torch.randn(16, 32, requires_grad=True)
    # The first call measures; the second is the one that is counted.
    loop(model.step, inputs, state, **options)
    torch.manual_seed(1)
    with Recorder() as recorder:
        outputs, after = loop(model.step, inputs, state, **options)
        held_bytes = recorder.num_bytes()
        (outputs.square().mean() + after.square().mean()).backward()
    gradients = [inputs.grad, state.grad, *(one.grad for one in model.parameters())]
    return [outputs, after, torch.get_rng_state(), *gradients], recorder.num_timesteps, held_bytes


# All timesteps but those of the last chunk run once more.
@pytest.mark.parametrize(("options", "most"), [({}, 47), ({"chunk_size": 4}, 44)])
def test_the_loop_is_bit_equal_and_holds_fewer_bytes(options, most):
    plain, plain_timesteps, plain_bytes = train_step(plain_loop)
    ours, timesteps, held_bytes = train_step(checkpoint_timesteps, **options)
    assert all(map(torch.equal, plain, ours))
    assert plain_timesteps == STEPS < timesteps <= most
    assert held_bytes < 0.6 * plain_bytes


@pytest.mark.parametrize("time_dim", [0, 1])
@pytest.mark.parametrize("outputs", ["stack", "sum", "mean", "last"])
def test_outputs_are_collected_as_in_a_plain_loop(outputs, time_dim):
    model, inputs, state = Neurons(), torch.randn(STEPS, 16, 8), torch.zeros(16, 32)
    torch.manual_seed(1)
    stacked, after = plain_loop(model.step, inputs, state)
    total = functools.reduce(torch.add, stacked)
    expected = {"sum": total, "mean": total / STEPS, "last": stacked[-1]}
    expected["stack"] = stacked.movedim(0, time_dim)
    torch.manual_seed(1)
    options = {"outputs": outputs, "time_dim": time_dim, "chunk_size": 7}
    found = checkpoint_timesteps(model.step, inputs.movedim(0, time_dim), state, **options)
    assert all(map(torch.equal, found, (expected[outputs], after)))


def test_a_chunk_as_long_as_the_loop_and_a_loop_without_training_run_once():
    assert train_step(checkpoint_timesteps, chunk_size=STEPS)[1] == STEPS
    model = Neurons().eval()
    inputs = torch.randn(STEPS, 16, 8)
    with Recorder() as recorder:
        outputs, _ = checkpoint_timesteps(model.step, inputs, torch.zeros(16, 32), chunk_size=2)
        outputs.sum().backward()
    assert recorder.num_timesteps == STEPS


class Storing(Neurons):
    """Neurons that store their voltage themselves, which a recomputed step finds again."""

    voltage = 0.0

    def step(self, x, state):
        self.voltage = 0.9 * self.voltage + self.inner(x)
        return self.outer(torch.sigmoid(self.voltage)), state


def test_what_a_module_stores_is_restored_and_state_elsewhere_is_refused():
    inputs = torch.randn(STEPS, 16, 8)
    gradients = []
    for loop in (plain_loop, functools.partial(checkpoint_timesteps, chunk_size=4)):
        torch.manual_seed(0)
        model = Storing()
        # The search for modules goes through functions that call others.
        step = functools.partial(operator.call, functools.partial(operator.call, model.step))
        loop(step, inputs, torch.zeros(1))[0].square().mean().backward()
        gradients.append(model.inner.weight.grad)
    assert torch.equal(*gradients)
    number = itertools.count()
    with pytest.raises(ValueError, match="outside of its modules"):
        checkpoint_timesteps(lambda x, state: (x * next(number), state), inputs, None, chunk_size=4)


def test_a_chunk_size_of_0_is_refused_and_nan_is_not():
    model, inputs = Neurons(), torch.full((9, 16, 8), torch.nan)
    steps = functools.partial(checkpoint_timesteps, model.step, inputs, torch.zeros(16, 32))
    with pytest.raises(ValueError, match="chunk_size"):
        steps(chunk_size=0)
    assert steps(chunk_size=4)[0].isnan().all()
