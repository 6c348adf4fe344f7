"""Tests of the checkpoint gates: they hold on right code, and fail on planted faults.

python -m pytest tests/gates/test_checkpoint_policy.py
"""

import pytest
import torch
from odd_trainings import ODD, StatefulLayer
from saboteurs import faults
from torch import nn

from curry_train.gates import checkpoint_policy
from curry_train.gates.first_look import explained, look
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, default_workload

GATES = {gate.name.partition("/")[2]: gate for gate in checkpoint_policy.GATES}
ON_ONE = {name: gate for name, gate in GATES.items() if name != "two-ranks"}


@pytest.mark.parametrize("gate", ON_ONE)
@pytest.mark.parametrize("name", [*BUILTIN_WORKLOADS, *ODD])
def test_gates_hold(name, gate):
    verdict = ON_ONE[gate].run(Case(ODD[name]() if name in ODD else load_workload(name)))
    assert verdict.passed, verdict
    assert verdict.ran == ("model", "loss", "machine")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gates_hold_with_dropout_and_bfloat16(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = transformer(dropout=0.1, depth=1)
    for gate in ON_ONE.values():
        verdict = gate.run(Case(model, dtype=torch.bfloat16, device=torch.device(device)))
        assert verdict.passed, verdict


def test_two_ranks_resume_in_half_precision():
    verdict = GATES["two-ranks"].run(Case(load_workload("transformer"), dtype=torch.bfloat16))
    assert verdict.passed, verdict
    assert "not compared" not in verdict.measured


def test_a_state_too_large_to_be_written_often_is_left_out(monkeypatch):
    monkeypatch.setattr(checkpoint_policy, "LARGEST_STATE_BYTES", 100)
    for name in ("committed", "damage"):
        verdict = GATES[name].run(Case(load_workload("mlp")))
        assert verdict.passed is None
        assert "dozens of times" in verdict.hint


def test_what_the_model_keeps_outside_of_its_state_is_found():
    """A resume can't restore what `state_dict` leaves out."""
    workload = default_workload("kept", StatefulLayer, (StatefulLayer(), torch.randn(4, 8)))
    verdict = GATES["bitwise"].run(Case(workload))
    assert verdict.passed is False
    assert "not in its state_dict()" in verdict.hint


class Function(nn.Linear):
    """Has a function in its state, which no checkpoint holds."""

    def __init__(self):
        super().__init__(8, 8)

    def get_extra_state(self):
        return print

    def set_extra_state(self, state):
        pass


def test_a_state_that_no_checkpoint_holds_does_not_apply_with_the_cause():
    case = Case(default_workload("function", Function, (Function(), torch.randn(4, 8))))
    findings = look(case)
    for gate in ON_ONE.values():
        verdict = explained(gate.run(case), findings)
        assert verdict.passed is None, verdict
        assert "_extra_state" in verdict.hint


@pytest.mark.parametrize("saboteur", faults("faulty_checkpoints"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
