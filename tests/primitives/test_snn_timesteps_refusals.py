"""What a step stores in its modules is restored, and state elsewhere is refused.

python -m pytest tests/primitives/test_snn_timesteps_refusals.py
"""

import re
from functools import partial

import pytest
import snntorch
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from curry_train.primitives import HiddenState, checkpoint_timesteps

from .snn_models import WIDTH, Keeper, Net, build, currents, same, trained

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


def writes(self, x):
    self.kept.mul_(0.5).add_(x.detach().mean())
    return x + self.kept


def lists(self, x):
    self.kept.append(x)
    return sum(self.kept[-3:])


def has_parameters_for_each_timestep(self, x):
    self.kept += 1
    return self.layers[self.kept % 4](x)


def keeping(act, kept):
    return lambda: Net(lambda: Between(act, kept=kept()))


STORED = {
    "buffer in place": keeping(writes, lambda: torch.zeros(1)),
    "list": keeping(lists, list),
    "layer of the timestep": lambda: Net(
        lambda: Between(
            has_parameters_for_each_timestep,
            kept=0,
            layers=nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4)),
        )
    ),
    "neuron in a list": keeping(lambda self, x: self.kept[1](x), lambda: [0, Keeper()]),
    "parametrization": lambda: Net(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
}


@pytest.mark.parametrize("kind", STORED)
def test_state_that_a_module_stores_trains_as_in_the_plain_loop(kind):
    assert same(STORED[kind], currents(), chunk_size=3)
    if kind == "list":
        ours = build(STORED[kind])
        trained(ours, checkpoint_timesteps, currents(), chunk_size=3)
        assert len(ours.between.kept) == 10


def test_state_in_variables_and_weights_is_found():
    module = build()
    x = currents()
    memory = []
    sum_of_inputs = torch.zeros(1)

    def remembers(x, state):
        memory.append(x)
        out, state = module.step(x, state)
        return out + sum(memory), state

    def adds_in_place(x, state):
        sum_of_inputs.add_(x.mean())
        out, state = module.step(x, state)
        return 0 * out + 1e-9 * sum_of_inputs, state

    def learns(x, state):
        with torch.no_grad():
            module.first.weight.mul_(1.01)
        return module.step(x, state)

    def hands_on_more_once(x, state):
        memory.append(x)
        out, state = module.step(x, state[:2])
        # The last timestep of the first run is the ninth call.
        return out, (*state, out) if len(memory) == 9 else state

    message = (
        "step computes something else the second time, from the same input, state and modules: it "
        "keeps state outside of its modules (in an object, a variable, a global, or a random "
        "generator of its own), and a recomputed chunk would start from the last value: gradients "
        "would be wrong without any error. Pass it in and return it with the state, or store it in "
        "a module"
    )
    for step in (remembers, adds_in_place, learns, hands_on_more_once):
        with pytest.raises(HiddenState, match=f"^{re.escape(message)}$"):
            checkpoint_timesteps(step, x, module.initial_state(x), chunk_size=3)
    assert len(memory) == 12


class Cells:
    """An object with a step, which is no module."""

    total = 0.0

    def step(self, x, state):
        self.total = 0.5 * self.total + x
        return self.total, state + x

    __call__ = step


class Wider:
    """An object whose output is wider after each call."""

    width = 0

    def __call__(self, x, state):
        self.width += 1
        return x.repeat(1, self.width), state


@pytest.mark.parametrize(
    "step",
    [
        Cells(),
        Cells().step,
        Wider(),
        partial(Cells.step, Cells()),
    ],
)
def test_state_of_objects_and_of_what_a_partial_binds_is_found(step):
    x = currents()
    with pytest.raises(HiddenState, match="outside of its modules"):
        checkpoint_timesteps(step, x, torch.zeros_like(x[0]), chunk_size=3)


def test_snntorch_neurons_train_the_same_with_hidden_state_and_without():
    class Leaky(Net):
        def __init__(self, **kept):
            super().__init__()
            self.leaky = snntorch.Leaky(beta=0.9, **kept)

        def step(self, x, state):
            if self.leaky.init_hidden:
                return self.leaky(self.first(x)), state
            spikes, first = self.leaky(self.first(x), state[0])
            return spikes, (first, *state[1:])

    for make in (Leaky, partial(Leaky, init_hidden=True)):
        assert same(make, currents(), chunk_size=3)


LAZY = nn.LazyLinear(3)


def pair_of(step_returns):
    module = build()
    return lambda x, state: step_returns(*module.step(x, state), x)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            {"chunk_size": 0},
            "chunk_size must be a whole number from 1 up, or None to measure it; got 0",
        ),
        ({"outputs": "all"}, "outputs must be one of stack, sum, mean, last; got 'all'"),
        ({"inputs": currents(0)}, r"^inputs have no timestep to run: is time_dim right\?$"),
        ({"inputs": []}, "^inputs have no timestep to run"),
        ({"inputs": "text"}, "^inputs must be a tensor, or a sequence .*; got str$"),
        (
            {"inputs": pack_sequence([torch.ones(3, 6)])},
            "a sequence with one entry for each timestep; got PackedSeq",
        ),
        (
            {"step": lambda x, state: LAZY(x)},
            "When using LazyModules Call `forward` with a dummy batch",
        ),
        (
            {"step": pair_of(lambda out, state, x: out)},
            r"^step must return a pair, \(output, state\), not tensor\(",
        ),
        ({"step": pair_of(lambda out, state, x: (out, *state))}, r"not \("),
        (
            {"step": pair_of(lambda out, state, x: (out, (state[0], x.add_(1))))},
            "step writes into the input or the state that it is given, which is needed again in "
            r"backward: make a new tensor \(v = v \* decay, not v \*= decay\)$",
        ),
        (
            {"step": lambda x, state: (x + state[0].mul_(0.9), state)},
            r"writes into the input or the state .*v = v \* decay, not v \*= decay",
        ),
    ],
)
def test_wrong_inputs_and_states_are_refused_with_the_remedy(kept, message):
    module, x = build(), currents()
    step, inputs = kept.pop("step", module.step), kept.pop("inputs", x)
    with pytest.raises(ValueError, match=message):
        checkpoint_timesteps(step, inputs, module.initial_state(x), **{"chunk_size": 4, **kept})


@pytest.mark.parametrize("outputs", ["sum", "mean"])
def test_truth_values_have_no_sum(outputs):
    step = pair_of(lambda out, state, x: ((1, out > 1), state))
    with pytest.raises(RuntimeError, match="on a bool tensor is not supported"):
        checkpoint_timesteps(step, currents(), build().initial_state(currents()), outputs=outputs)
