"""Tests of the checkpoint gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_checkpoint_policy.py
"""

import pytest
import torch
from saboteurs import faults

from curry_train.gates import checkpoint_policy
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case

CHECKS = {
    gate.name: gate.check
    for gate in (*checkpoint_policy.CHECKPOINT_GATES, *checkpoint_policy.RETENTION_GATES)
}
CASE = Case(transformer(dropout=0.1, depth=1))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("check", CHECKS)
def test_gates_hold_with_dropout_and_bfloat16(check):
    verdict = CHECKS[check](Case(transformer(dropout=0.1, depth=1), dtype=torch.bfloat16))
    assert verdict.passed, verdict


def test_gates_hold_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for check in CHECKS.values():
        verdict = check(Case(transformer(depth=1), device=torch.device("cuda")))
        assert verdict.passed, verdict


def test_a_state_too_large_to_be_written_often_is_left_out(monkeypatch):
    monkeypatch.setattr(checkpoint_policy, "LARGEST_STATE_BYTES", 100)
    for check in (checkpoint_policy.committed, checkpoint_policy.damage):
        verdict = check(CASE)
        assert verdict.passed is None
        assert "dozens of times" in verdict.hint


# Saboteurs of a commit: they write into the old checkpoint, remove the old one first, or write no
# manifest.


# Saboteurs of a state: each leaves out one component.


# Saboteurs of the verification: no hash, only the manifest's sizes, or only data files.


# Saboteurs of a load: torch's own reader, with and without the hashes.


@pytest.mark.parametrize("saboteur", faults("faulty_checkpoints"), ids=str)
# A forged call of open leaves a file that nobody closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_gate_catches(saboteur):
    saboteur.check()
