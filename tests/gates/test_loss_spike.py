"""Tests of the loss-spike gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_loss_spike.py
"""

import pytest
import torch
from faulty_spikes import OfThisProcess, takes_them_again
from saboteurs import faults

from curry_train.gates import loss_spike
from curry_train.gates.trials import SpikeComponents
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case

# The gates on two ranks have their tests in test_two_ranks.py.
GATES = [gate for gate in loss_spike.GATES if not gate.name.endswith("/two-ranks")]
CHECKS = {gate.name: gate.check for gate in GATES}
CASE = Case(transformer(dropout=0.1, depth=1))


# The loops are planted, and the same for each model.
@pytest.mark.parametrize("check", sorted(CHECKS.keys() - {"loss-spike/loops"}))
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


# Saboteurs of the watchdog: never reports; uses the mean of all losses as limit; misses NaN,
# which is not above any limit; reports a single high loss.


# Saboteurs of a recovery: trains on the samples again; keeps the weights; loads the newest
# state, from after the spike; keeps the optimizer state; skips one window too few.


# Saboteurs of the state passed to the next process: the watchdog starts fresh; skips are lost.


def test_a_recovery_without_an_end_is_stopped():
    """Stop, by the gate itself, a run that trains on bad samples again and again."""
    parts = SpikeComponents(recover=takes_them_again, recoveries=OfThisProcess)
    with pytest.raises(ValueError, match="the recovery does not end"):
        loss_spike.recovered(CASE, parts=parts)


@pytest.mark.parametrize("saboteur", faults("faulty_spikes"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
