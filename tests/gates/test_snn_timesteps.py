"""Tests of the timestep gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_snn_timesteps.py
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trained_on_ranks import compare_on_ranks

from curry_train.core.parity import compare, record_step
from curry_train.gates import snn_timesteps
from curry_train.gates.fixtures import run_on_ranks
from curry_train.primitives.hidden_state import HiddenState, check_step
from curry_train.primitives.snn_timesteps import (
    checkpoint_timesteps,
    recompute_timesteps,
    run_timesteps,
)
from curry_train.primitives.strategies import STRATEGIES
from curry_train.workloads.models import (
    BUILTIN_WORKLOADS,
    SpikingNetwork,
    SurrogateSpike,
    load_workload,
    snn,
)
from curry_train.workloads.workload import Case

# The gates hold on the right implementation.

CHECKS = {gate.name: gate.check for gate in snn_timesteps.GATES}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_loops_over_time_and_do_not_apply_elsewhere(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    assert verdict.gate == check
    assert verdict.passed is (True if name == "snn" else None), verdict


class Noisy(SpikingNetwork):
    """A spiking network with dropout on the input of each step."""

    def step(self, x, state):
        return super().step(nn.functional.dropout(x, 0.3, self.training), state)


NOISY = replace(snn(), build=lambda: Noisy(64, 3))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = Case(NOISY, device=torch.device(device), dtype=dtype)
    for check in CHECKS.values():
        verdict = check(case)
        assert verdict.passed is not False, verdict


def test_gates_hold_without_blocks_on_short_loops_and_with_other_patterns():
    lone = replace(snn(depth=1), build=lambda: SpikingNetwork(64, 1))
    for case in (
        Case(lone),
        Case(snn(timesteps=2)),
        Case(snn(timesteps=1)),
        Case(snn(), blocks="layers.*"),
    ):
        for check in CHECKS.values():
            verdict = check(case)
            assert verdict.passed is not False, verdict
    assert snn_timesteps.timestep_memory(Case(snn(timesteps=2))).passed is None


# Saboteurs that are faulty techniques.


def replaced(unroll):
    """Build a technique that replaces the model's loop."""

    def apply(module, sample):
        module.unroll = unroll
        return [""]

    return apply


def in_chunks(around, *, size=4):
    """Build a loop in chunks as written by hand; `around(run, *args)` runs one chunk."""

    def unroll(step, inputs, state, *, time_dim=0, outputs="stack"):
        def run(total, x, *state):
            output, state = run_timesteps(step, x, state, time_dim=time_dim, outputs="sum")
            return (total + output, *state)

        total = torch.zeros_like(inputs.select(time_dim, 0))
        for x in inputs.split(size, time_dim):
            total, *state = around(run, total, x, *state)
        return total / inputs.shape[time_dim], tuple(state)

    return unroll


def rerun(run, *args, **options):
    return checkpoint(run, *args, use_reentrant=False, **options)


def no_op(module, sample):
    return [""]


def drops_the_rest(step, inputs, state, *, time_dim=0, outputs="stack"):
    whole = inputs.shape[time_dim] // 5 * 5
    return checkpoint_timesteps(
        step,
        inputs.narrow(time_dim, 0, whole),
        state,
        chunk_size=5,
        time_dim=time_dim,
        outputs=outputs,
    )


def detaches_the_state(run, total, x, *state):
    return rerun(run, total, x, *(tensor.detach() for tensor in state))


def keeps_the_state(run, total, x, *state, calls=[]):  # noqa: B006 - the planted fault
    def run_with_hidden_state(total, x, *state):
        total, *after = run(total, x, *[tensor + 0.1 * len(calls) for tensor in state])
        calls.append(None)
        return total, *after

    return rerun(run_with_hidden_state, total, x, *state)


def no_generator_kept(run, *args):
    return rerun(run, *args, preserve_rng_state=False)


def stacked_first(step, inputs, state, *, time_dim=0, outputs="stack"):
    stacked, state = checkpoint_timesteps(step, inputs, state, time_dim=time_dim, outputs="stack")
    return stacked.clone().mean(time_dim), state


def one_step_at_a_time(module, sample):
    return recompute_timesteps(module, chunk_size=1)


def another_level(module, sample):
    return recompute_timesteps(module, levels=2)


whole_chunks = replaced(in_chunks(rerun))


def parity(case, *, apply):
    return snn_timesteps.timestep_parity(case, strategy="timesteps", apply=apply)


def flops(case, *, apply):
    return snn_timesteps.timestep_flops(case, strategy="timesteps", apply=apply)


@pytest.mark.parametrize(
    ("check", "saboteur", "workload", "in_hint"),
    [
        (parity, no_op, snn(), "nothing ran twice or was freed"),
        (parity, replaced(drops_the_rest), snn(), "another value"),
        (parity, replaced(in_chunks(detaches_the_state)), snn(), "another value"),
        (parity, replaced(in_chunks(keeps_the_state)), snn(), "another value"),
        (parity, replaced(in_chunks(no_generator_kept)), NOISY, "preserve_rng_state=True"),
        (snn_timesteps.timestep_memory, no_op, snn(), "held for each timestep"),
        (snn_timesteps.timestep_memory, one_step_at_a_time, snn(timesteps=64), "another size"),
        (
            snn_timesteps.timestep_memory,
            replaced(stacked_first),
            snn(timesteps=64),
            "held for each timestep",
        ),
        (flops, no_op, snn(), "not recomputed exactly once per level"),
        (flops, another_level, snn(), "not recomputed exactly once per level"),
        (flops, whole_chunks, snn(), "not recomputed exactly once per level"),
    ],
)
def test_gate_catches(check, saboteur, workload, in_hint):
    verdict = check(Case(workload), apply=saboteur)
    assert verdict.passed is False, verdict
    assert in_hint in verdict.hint, verdict
    assert "--blocks" not in verdict.hint


def test_parity_fails_on_a_fault_in_a_model_that_repeats_no_block():
    lone = Case(replace(snn(depth=1), build=lambda: SpikingNetwork(64, 1)))
    assert parity(lone, apply=STRATEGIES["timesteps"].apply).passed
    assert parity(lone, apply=replaced(drops_the_rest)).passed is False


def blind(step, timesteps, state):
    return {}


def sees_it_everywhere(step, timesteps, state):
    raise HiddenState("state", "layers.0", "potential")


def names_another(step, timesteps, state):
    if isinstance(step, snn_timesteps.PlantedStep):
        raise HiddenState("state", "layers.0", "weight")


def looks_for_spikes_only(step, timesteps, state):
    """Detect by two runs of one step, in which the threshold is not reached yet."""
    first, second = (step(timesteps[0], state)[0] for _ in range(2))
    if not torch.equal(first, second):
        raise HiddenState("state", "", "potential")


@pytest.mark.parametrize(
    "detector", [blind, sees_it_everywhere, names_another, looks_for_spikes_only]
)
def test_the_gate_catches_a_wrong_detector(detector):
    assert snn_timesteps.hidden_state(Case(snn()), check=check_step).passed
    verdict = snn_timesteps.hidden_state(Case(snn()), check=detector)
    assert verdict.passed is False, verdict


# Saboteurs that are models.


class Keeper(nn.Module):
    """A neuron that holds its potential as an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.v = 0.0

    def forward(self, x, potential):
        self.v = 0.9 * self.v + self.linear(x)
        spikes = SurrogateSpike.apply(self.v - 1.0)
        self.v = self.v - spikes
        return spikes, potential


class KeeperNet(SpikingNetwork):
    def __init__(self):
        super().__init__(64, 3)
        self.layers[1] = Keeper()

    def forward(self, x):
        self.layers[1].v = 0.0
        return super().forward(x)


KEEPERS = replace(snn(), build=KeeperNet)


@pytest.mark.parametrize(
    "check", ["snn-timesteps/hidden-state", "snn-timesteps/parity", "snn-timesteps/memory"]
)
def test_a_model_with_hidden_state_fails_with_its_name(check):
    gate = next(gate for gate in snn_timesteps.GATES if gate.name == check)
    verdict = gate.run(Case(KEEPERS))
    assert verdict.passed is False
    assert "layers.1 (Keeper) keeps state" in verdict.hint, verdict
    assert "'v'" in verdict.hint


def test_chunks_around_neurons_that_keep_state_are_silently_wrong():
    case = Case(KEEPERS)
    loss = case.workload.mean_loss
    batch = case.batch()
    reference = record_step(case.build(), batch, loss)
    model = case.build()
    whole_chunks(model, None)
    found = record_step(model, batch, loss)
    assert torch.equal(found.loss, reference.loss)  # without an error
    assert compare(reference, found).worst > 0.01


# Under DDP and FSDP2 the gradients are the same, with the same number of collectives.


def gradients_on_ranks():
    return compare_on_ranks("snn", recompute_timesteps)


def test_two_ranks_have_the_same_gradients_and_as_many_collectives():
    for found in run_on_ranks(f"{__file__}:gradients_on_ranks"):
        for figures in found.values():
            assert figures["syncs"][0] > 0
            assert len(set(figures["syncs"])) == 1
            assert figures["differences"] == [0.0]
