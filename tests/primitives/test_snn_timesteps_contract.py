"""Chunked timesteps equal the plain loop to the bit, or refuse a state that they cannot restore.

python -m pytest tests/primitives/test_snn_timesteps_contract.py
"""

import functools
import gc
import random
import re
import weakref
from functools import partial

import numpy
import pytest
import snntorch
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from curry_train.core.measure import LiveStorages
from curry_train.core.parity import compare
from curry_train.gates.same_training import sample_of
from curry_train.primitives import (
    STRATEGIES,
    HiddenState,
    checkpoint_timesteps,
    recompute_timesteps,
    remove_timesteps,
    run_timesteps,
    snn_timesteps,
)
from curry_train.primitives.snn_timesteps import OUTPUT_MODES, Costs, best_chunks, even_chunks
from curry_train.workloads import Case
from curry_train.workloads.models import mlp, snn

from ..plan_models import Runs
from ..toy_steps import all_equal, stacked
from .snn_models import WIDTH, Keeper, Net, build, currents, same, trained

# Equality with the plain loop.


def test_a_loop_of_one_timestep_trains_as_the_plain_one():
    assert same(Net, currents(1))


@pytest.mark.parametrize("outputs", OUTPUT_MODES)
def test_state_and_outputs_may_be_nested(outputs):
    module, x = build(), currents()

    def step(x, state):
        spikes, (first, last) = module.step(x, (state["first"], state["last"][0]))
        return {"spikes": spikes, "trace": [last, x.sum()]}, {
            "first": first,
            "last": [last, state["last"][1] + 1],
        }

    zero = x.new_zeros(4, WIDTH)
    state = {"first": zero, "last": [zero, 0]}
    plain = run_timesteps(step, x, state, outputs=outputs)
    ours = checkpoint_timesteps(step, x, state, outputs=outputs, chunk_size=3)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


def draws(draw):
    return Runs(lambda _, x: torch.tanh(x * (1 + draw())))


@pytest.mark.parametrize(
    "between",
    [
        lambda: nn.BatchNorm1d(WIDTH),
        lambda: draws(lambda: torch.rand(())),
        lambda: draws(random.random),
        lambda: draws(lambda: float(numpy.random.rand())),
    ],
    ids=["batch_norm", "torch", "python", "numpy"],
)
def test_random_numbers_and_statistics_are_those_of_the_plain_loop(between):
    assert same(lambda: Net(between), currents(), chunk_size=2)


def test_backward_may_come_twice_and_be_differentiated():
    def gradients(run, **kept):
        module, x = build(lambda: Net(nn.Tanh)), currents().requires_grad_()
        out = run(module.step, x, module.initial_state(x), **kept)[0].square().sum()
        first = torch.autograd.grad(out, x, retain_graph=True)[0]
        second = torch.autograd.grad(out, x, create_graph=True)[0]
        assert torch.equal(first, second)
        return [first, *torch.autograd.grad(second.square().sum(), [module.first.weight, x])]

    assert all_equal(gradients(run_timesteps), gradients(checkpoint_timesteps, chunk_size=3))


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # a warning of the compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_loop_equals_the_plain_one_up_to_rounding():
    def compiled(step, x, state):
        @torch.compile(backend="aot_eager")
        def run(x, state):
            return checkpoint_timesteps(step, x, state, chunk_size=4)

        return run(x, state)

    plain, gradients = trained(build(), run_timesteps, currents())
    ours, found = trained(build(), compiled, currents())
    assert compare(plain, ours, tolerance=1e-5).holds
    torch.testing.assert_close(found, gradients)


# Memory and cost.


STEPS = 40


@settings(max_examples=60, deadline=None)
@given(steps=integers(1, 60), boundary=integers(0, 9), step=integers(0, 9), size=integers(1, 70))
def test_no_even_chunks_are_better_and_no_step_is_lost(steps, boundary, step, size):
    def peak(sizes):
        """Return the most bytes of a chunk's timesteps and of the boundaries up to it."""
        last = len(sizes) - 1
        return max(min(i + 1, last) * boundary + one * step for i, one in enumerate(sizes))

    best, even = best_chunks(steps, Costs(boundary, step)), even_chunks(steps, size)
    assert peak(best) <= peak(even)
    assert sum(best) == sum(even) == steps
    assert min(*best, *even) > 0


def test_only_stacked_outputs_are_held_for_each_timestep():
    module, x = build(), currents(STEPS, 64)
    held = {}
    for outputs in OUTPUT_MODES:
        for _ in range(2):
            with LiveStorages() as storages:
                made = checkpoint_timesteps(
                    module.step, x, module.initial_state(x), chunk_size=10, outputs=outputs
                )[0]
                held[outputs] = storages.bytes_alive
            del made
    one = 64 * WIDTH * 4
    assert held["sum"] == held["mean"] == held["last"]
    assert held["stack"] - held["sum"] == (STEPS - 1) * one


def test_nothing_is_held_after_the_result_is_deleted():
    module, x = build(), currents()
    for outputs in OUTPUT_MODES:
        out, after = checkpoint_timesteps(
            module.step, x, module.initial_state(x), chunk_size=2, outputs=outputs
        )
        alive = [weakref.ref(out), weakref.ref(after[0])]
        gc.disable()
        try:
            del out, after
            assert [reference() for reference in alive] == [None, None]
        finally:
            gc.enable()


def test_only_the_first_call_measures_and_it_changes_nothing(monkeypatch):
    called = []
    plain = snn_timesteps.check_step
    monkeypatch.setattr(
        snn_timesteps, "check_step", lambda *args: called.append("check_step") or plain(*args)
    )
    module, x = build(lambda: Net(lambda: nn.BatchNorm1d(WIDTH))), currents()
    module.first.weight.grad = torch.ones_like(module.first.weight)
    before = torch.get_rng_state()
    for _ in range(3):
        checkpoint_timesteps(lambda x, state: module.step(x, state), x, module.initial_state(x))
    assert called == ["check_step"]
    # Another step of the same modules has costs of its own.
    checkpoint_timesteps(lambda x, state: module.step(-x, state), x, module.initial_state(x))
    assert called == ["check_step"] * 2
    # No step draws, so no state of a generator is saved.
    assert plain(module.step, x, module.initial_state(x)).boundary_bytes == 2 * 4 * WIDTH * 4
    assert torch.equal(before, torch.get_rng_state())
    assert module.between.num_batches_tracked == 40
    assert torch.equal(module.first.weight.grad, torch.ones_like(module.first.weight))
    module = weakref.ref(module)
    gc.collect()
    assert module() is None  # the cached measurement does not keep it alive


# Models whose loop is a method.


def test_only_outer_loops_are_replaced_and_one_on_the_instance_is_restored():
    model = stacked(lambda: Case(snn()).build(), 3)
    model[0].inner = Case(snn()).build()
    model[1].unroll = 3
    model[2].unroll = own = functools.partial(run_timesteps)
    assert recompute_timesteps(model) == ["0", "2"]
    with pytest.raises(ValueError, match="is wrapped already"):
        recompute_timesteps(model)
    with pytest.raises(ValueError, match="chunk_size"):
        recompute_timesteps(model, chunk_size=0)
    assert model[2].unroll is not own
    assert remove_timesteps(model) == ["0", "2"]
    assert remove_timesteps(model) == []
    assert model[2].unroll is own


def test_other_models_are_refused_with_the_line_to_write():
    case = Case(mlp())
    message = (
        "Sequential has no method unroll(step, inputs, state), so its loop over time can't be "
        "replaced from outside; replace the loop in its forward by one line: outputs, state = "
        'checkpoint_timesteps(self.step, inputs, state, time_dim=0, outputs="stack")'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        STRATEGIES["timesteps"].apply(case.build(), sample_of(case))
    with pytest.raises(ValueError, match="for the whole loop, not for single blocks"):
        STRATEGIES["timesteps"].apply(
            Case(snn()).build(), sample_of(Case(snn(), blocks="layers.*"))
        )


# Refusals.


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
