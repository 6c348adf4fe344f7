"""Errors in an input, a state or a step are reported with their remedy.

python -m pytest tests/primitives/test_snn_timesteps_inputs.py
"""

import pytest
import torch
from snn_models import WIDTH, build, currents
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from curry_train.primitives.snn_timesteps import (
    checkpoint_timesteps,
    run_timesteps,
)

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
        ({"time_dim": 3}, r"inputs of shape \(10, 4, 6\) have no dimension 3"),
        ({"time_dim": None}, "time_dim must be a whole number, got None"),
        (
            {"inputs": currents(0)},
            r"inputs of shape \(0, 4, 6\) have no timestep in dimension 0: is time_dim right",
        ),
        ({"inputs": []}, "an empty sequence: there is no timestep to run"),
        (
            {"inputs": pack_sequence([torch.ones(3, 6)])},
            "a sequence with one entry for each timestep; got PackedSeq",
        ),
        (
            {"step": lambda x, state: LAZY(x)},
            "LazyLinear has no parameters yet: run one batch through it first",
        ),
        (
            {"step": pair_of(lambda out, state, x: out)},
            r"return a pair, \(output, state\), and returned Tensor",
        ),
        ({"step": pair_of(lambda out, state, x: (out, *state))}, "and returned 3 values"),
        (
            {"step": pair_of(lambda out, state, x: (out, (state[0], x.add_(1))))},
            "step writes into the input",
        ),
        (
            {"step": pair_of(lambda out, state, x: (out > 1, state)), "outputs": "sum"},
            "the sum of truth values",
        ),
    ],
)
def test_wrong_inputs_and_states_are_refused_with_the_remedy(kept, message):
    module, x = build(), currents()
    step, inputs = kept.pop("step", module.step), kept.pop("inputs", x)
    with pytest.raises(ValueError, match=message):
        checkpoint_timesteps(step, inputs, module.initial_state(x), **{"chunk_size": 4, **kept})


def test_a_step_that_writes_into_its_state_raises():
    module, x = build(), currents()

    def step(x, state):
        return module.first(x) + state[0].mul_(0.9), state

    with pytest.raises(
        ValueError, match=r"writes into the state .*v = v \* decay, not v \*= decay"
    ):
        checkpoint_timesteps(step, x, module.initial_state(x), chunk_size=4)


def test_a_wrong_time_dimension_is_mentioned_in_the_error_of_the_step():
    module, x = build(), currents()
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        checkpoint_timesteps(module.step, x, module.initial_state(x), chunk_size=4, time_dim=1)
    assert "is time_dim right?" in raised.value.__notes__[0]


def test_a_step_without_a_module_is_measured_too():
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def step(x, state):
        state = torch.tanh(x @ weight + state)
        return state, state

    gradients = []
    for loop in (checkpoint_timesteps, run_timesteps):
        weight.grad = None
        loop(step, currents(), torch.zeros(4, WIDTH))[0].sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)
