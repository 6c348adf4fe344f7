"""Tests of the loss-spike gates: they hold on right code, and fail on planted faults.

python -m pytest tests/gates/test_loss_spike.py
"""

import pytest
import torch
from odd_trainings import ODD
from saboteurs import faults

from curry_train.gates import loss_spike
from curry_train.gates.implementation import load_implementation
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case

GATES = {gate.name: gate for gate in loss_spike.GATES}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", [*BUILTIN_WORKLOADS, *ODD])
def test_gates_hold(name, gate):
    verdict = GATES[gate].run(Case(ODD[name]() if name in ODD else load_workload(name)))
    assert verdict.passed, verdict
    assert {"model", "loss"} <= {*verdict.ran}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gates_hold_with_dropout_and_bfloat16(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = transformer(dropout=0.1, depth=1)
    for gate in GATES.values():
        verdict = gate.run(Case(model, dtype=torch.bfloat16, device=torch.device(device)))
        assert verdict.passed, verdict


@pytest.mark.parametrize("name", ["mlp", "transformer", "resnet"])
def test_a_watchdog_of_another_kind_is_enough(name):
    given = load_implementation("SpikeWatchdog=foreign_loss_spike:MedianWatchdog")
    verdicts = [gate.run(Case(load_workload(name)), [given]) for gate in GATES.values()]
    assert [verdict.passed for verdict in verdicts] == [True, None, None, None], verdicts
    assert "implementation" in verdicts[0].ran


@pytest.mark.parametrize("twin", ["Impatient", "MeanOfAll", "DeafToNaN"])
def test_its_wrong_twins_fail(twin):
    given = load_implementation(f"SpikeWatchdog=foreign_loss_spike:{twin}")
    verdict = GATES["loss-spike/found"].run(Case(load_workload("mlp")), [given])
    assert verdict.passed is False, verdict
    assert "in time" in verdict.measured


@pytest.mark.parametrize("saboteur", faults("faulty_spikes"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
