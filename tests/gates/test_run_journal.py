"""Tests of the journal's gates: they hold on models and fail on common faults.

python -m pytest tests/gates/test_run_journal.py
"""

import pytest
import torch
from saboteurs import faults

from curry_train.gates import checkpoint_policy
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case

CHECKS = {gate.name: gate.check for gate in checkpoint_policy.JOURNAL_GATES}
CASE = Case(transformer(dropout=0.1, depth=1))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("check", CHECKS)
def test_gates_hold_in_bfloat16(check):
    verdict = CHECKS[check](Case(transformer(depth=1), dtype=torch.bfloat16))
    assert verdict.passed, verdict


@pytest.mark.parametrize("saboteur", faults("faulty_journal"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
