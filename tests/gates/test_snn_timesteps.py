"""Tests of the timestep gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_snn_timesteps.py
"""

from dataclasses import replace

import pytest
import torch
from faulty_timesteps import NOISY, drops_the_rest, replaced, whole_chunks
from saboteurs import faults
from torch import nn
from trained_on_ranks import compare_on_ranks

from curry_train.core.parity import compare, record_step
from curry_train.gates import snn_timesteps
from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives.snn_timesteps import (
    recompute_timesteps,
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


def parity(case, *, apply):
    return snn_timesteps.timestep_parity(case, strategy="timesteps", apply=apply)


def flops(case, *, apply):
    return snn_timesteps.timestep_flops(case, strategy="timesteps", apply=apply)


def test_parity_fails_on_a_fault_in_a_model_that_repeats_no_block():
    lone = Case(replace(snn(depth=1), build=lambda: SpikingNetwork(64, 1)))
    assert parity(lone, apply=STRATEGIES["timesteps"].apply).passed
    assert parity(lone, apply=replaced(drops_the_rest)).passed is False


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


@pytest.mark.parametrize("saboteur", faults("faulty_timesteps"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
