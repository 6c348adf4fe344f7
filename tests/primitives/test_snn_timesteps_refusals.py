"""What a step stores in its modules is restored, and state elsewhere is refused.

python -m pytest tests/primitives/test_snn_timesteps_refusals.py
"""

import copy
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from snn_models import WIDTH, Keeper, Net, build, currents
from torch import nn

from curry_train.core.parity import compare, record
from curry_train.primitives.snn_timesteps import (
    HiddenState,
    checkpoint_timesteps,
    run_timesteps,
)
from curry_train.workloads.models import SurrogateSpike


def train(module, loop, x, **kept):
    """Train one step and return its record."""
    torch.manual_seed(3)
    out, _ = loop(module.step, x, module.initial_state(x), **kept)
    out.square().sum().backward()
    return record(module, out.detach())


def chunks(module, x, *, chunk_size=3, **kept):
    return train(module, checkpoint_timesteps, x, chunk_size=chunk_size, **kept)


# Steps that are refused.


class Between(nn.Module):
    """A layer that runs a given function and can store something."""

    def __init__(self, act, **kept):
        super().__init__()
        self.act = act
        for name, value in kept.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.act(self, x)


def integrates(self, x):
    self.kept = 0.5 * self.kept + x
    return SurrogateSpike.apply(self.kept - 1)


def writes(self, x):
    self.kept.mul_(0.5).add_(x.detach().mean())
    return x + self.kept


def lists(self, x):
    self.kept.append(x)
    return sum(self.kept[-3:])


def counts(self, x):
    self.kept += 1
    return x / self.kept


def takes_turns(self, x):
    self.kept = not self.kept
    return x if self.kept else -x


def has_parameters_for_each_timestep(self, x):
    self.kept += 1
    return self.layers[self.kept % 4](x)


def asks_an_object(self, x):
    self.kept.sum = self.kept.sum + x
    return x + self.kept.sum


class Pair(NamedTuple):
    factor: float
    total: Any


def replaces_a_pair(self, x):
    self.kept = self.kept._replace(total=self.kept.factor * self.kept.total + x)
    return x + self.kept.total


def drops_the_same(self, x):
    if self.kept is None:
        self.kept = (torch.rand(x.shape) > 0.5).float()
    return x * self.kept


class Memory:
    sum = 0.0


def keeping(act, kept=0.0, **more):
    return lambda: Net(
        lambda: Between(act, kept=kept() if callable(kept) else copy.copy(kept), **more)
    )


def norms():
    return nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(4)])


STORED = {
    "attribute": keeping(integrates),
    "buffer in place": keeping(writes, lambda: torch.zeros(1)),
    "list": keeping(lists, list),
    "counter": keeping(counts, 0),
    "flag": keeping(takes_turns, False),
    "named tuple": keeping(replaces_a_pair, Pair(0.5, 0.0)),
    "mask": keeping(drops_the_same, None),
    "layer of the timestep": lambda: Net(
        lambda: Between(has_parameters_for_each_timestep, kept=0, layers=norms())
    ),
    "neuron in a list": keeping(lambda self, x: self.kept[1](x), lambda: [0, Keeper()]),
    "parametrization": lambda: Net(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
}


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("kind", STORED)
def test_state_that_a_module_stores_trains_as_in_the_plain_loop(kind, levels):
    plain = train(build(STORED[kind]), run_timesteps, currents())
    assert compare(plain, chunks(build(STORED[kind]), currents(), levels=levels)).bit_equal


def test_state_in_an_object_is_refused():
    with pytest.raises(HiddenState, match="outside of its modules"):
        chunks(build(keeping(asks_an_object, Memory)), currents())


def test_state_in_variables_and_globals_is_found():
    module = build()
    x = currents()
    memory = []
    total = 0.0
    sum_of_inputs = torch.zeros(1)

    def remembers(x, state):
        memory.append(x)
        out, state = module.step(x, state)
        return out + sum(memory), state

    def adds_up(x, state):
        nonlocal total
        total = total + x
        out, state = module.step(x, state)
        return out + total, state

    def adds_in_place(x, state):
        sum_of_inputs.add_(x.mean())
        out, state = module.step(x, state)
        return out + sum_of_inputs, state

    def learns(x, state):
        with torch.no_grad():
            module.first.weight.mul_(1.01)
        return module.step(x, state)

    for step in (remembers, adds_up, adds_in_place, learns, counts_globally, counts_in_a_function):
        with pytest.raises(HiddenState, match="outside of its modules"):
            checkpoint_timesteps(step, x, module.initial_state(x), chunk_size=3)


class Cells:
    """An object with a step, which is no module."""

    total = 0.0

    def step(self, x, state):
        self.total = 0.5 * self.total + x
        return self.total, state + x

    __call__ = step


@pytest.mark.parametrize(
    "step",
    [
        Cells(),
        Cells().step,
        partial(Cells.step, Cells()),
        partial(lambda x, state, cells: cells(x, state), cells=Cells()),
    ],
)
def test_state_of_objects_and_of_what_a_partial_binds_is_found(step):
    x = currents()
    with pytest.raises(HiddenState, match="outside of its modules"):
        checkpoint_timesteps(step, x, torch.zeros_like(x[0]), chunk_size=3)


def counter_of_calls():
    seen = []

    def count(x):
        seen.append(0)
        return len(seen)

    return count


count_call = counter_of_calls()


def counts_in_a_function(x, state):
    number = count_call(x)
    out, state = GLOBAL_NET.step(x, state)
    return out * number, state


CALLS = [0]
GLOBAL_NET = build()


def counts_globally(x, state):
    CALLS[0] += 1
    out, state = GLOBAL_NET.step(x, state)
    return out * CALLS[0], state


def test_snntorch_neurons_train_the_same_with_hidden_state_and_without():
    snntorch = pytest.importorskip("snntorch", reason="snntorch is not installed")

    class Leaky(Net):
        def __init__(self, **kept):
            super().__init__()
            self.leaky = snntorch.Leaky(beta=0.9, **kept)

        def step(self, x, state):
            if self.leaky.init_hidden:
                return self.leaky(self.first(x)), state
            spikes, first = self.leaky(self.first(x), state[0])
            return spikes, (first, *state[1:])

    x = currents()
    for make in (Leaky, partial(Leaky, init_hidden=True)):
        for levels in (1, 2):
            plain = train(build(make), run_timesteps, x)
            assert compare(plain, chunks(build(make), x, levels=levels)).bit_equal


# Steps that are accepted, and train the same.


def counts_for_a_report(self, x):
    self.kept += 1
    return x


def adds_to_a_statistic(self, x):
    with torch.no_grad():
        self.kept.mul_(0.9).add_(x.mean())
    return x


def records(self, x):
    self.kept.append(x.detach())
    return x


def computes_a_constant_once(self, x):
    if self.kept is None:
        self.kept = torch.linspace(0, 1, WIDTH)
    return x + self.kept


def reports_from_its_third_run_on(self, x):
    self.kept += 1
    if self.kept > 2:
        self.report = x.detach()
    return x


class Recurrent(Net):
    def __init__(self):
        super().__init__(lambda: nn.LSTMCell(WIDTH, WIDTH))

    def step(self, x, state):
        state = self.between(self.first(x), state)
        return self.last(state[0]), state


class Settings:
    """An object of the user with another object inside, which is not examined."""

    def __init__(self):
        self.nested = Memory()
        self.nested.values, self.deep = [1.0], [[[[[[1.0]]]]]]


SOUND = {
    "batch norm": lambda: Net(lambda: nn.BatchNorm1d(WIDTH)),
    "batch norm, cumulative": lambda: Net(lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "dropout": lambda: Net(lambda: nn.Dropout(0.5)),
    "recurrent cell": Recurrent,
    "counter": keeping(counts_for_a_report, 0),
    "statistic": keeping(adds_to_a_statistic, lambda: torch.zeros(1)),
    "recorder": keeping(records, list),
    "report, third run": keeping(reports_from_its_third_run_on, 0),
    "constant": keeping(computes_a_constant_once, None),
    "objects": keeping(lambda self, x: x * self.kept.nested.values[0], lambda: Settings()),
}


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("kind", SOUND)
def test_sound_steps_are_accepted_and_their_counters_move_once(kind, levels):
    plain = build(SOUND[kind])
    ours = build(SOUND[kind])
    x = currents()
    assert compare(train(plain, run_timesteps, x), chunks(ours, x, levels=levels)).bit_equal
    if hasattr(plain.between, "kept"):
        kept, found = plain.between.kept, ours.between.kept
        if hasattr(plain.between, "report"):
            assert torch.equal(plain.between.report, ours.between.report)
        if kind == "recorder":
            assert len(kept) == len(found) == 10
            assert all(map(torch.equal, kept, found))
        elif isinstance(kept, torch.Tensor):
            assert torch.equal(kept, found)
        elif isinstance(kept, int | list):
            assert kept == found


class Handed(Net):
    """A neuron whose potential is set before it runs and read afterwards."""

    def __init__(self):
        super().__init__()
        self.keeper = Keeper()

    def step(self, x, state):
        self.keeper.v = state[0]
        spikes = self.keeper(self.first(x))
        return spikes, (self.keeper.v, *state[1:])


@pytest.mark.parametrize("levels", [1, 2])
def test_a_neuron_whose_state_is_passed_in_is_accepted(levels):
    plain = build(Handed)
    ours = build(Handed)
    x = currents()
    assert compare(train(plain, run_timesteps, x), chunks(ours, x, levels=levels)).bit_equal
    assert torch.equal(plain.keeper.v, ours.keeper.v)  # the value of the last timestep
