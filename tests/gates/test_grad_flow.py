"""Tests of the grad-flow gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_grad_flow.py
"""

import pytest
import torch
from saboteurs import faults
from torch import nn
from torch.nn import functional as F

from curry_train.gates import grad_flow
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

SMALL = transformer(depth=2, dim=32, length=16, vocabulary=64)
# The gates on two ranks have their tests in test_two_ranks.py.
GATES = [gate for gate in grad_flow.GATES if not gate.name.endswith("/two-ranks")]
CHECKS = {gate.name: gate.check for gate in GATES}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    workload = transformer(depth=2, dim=32, length=16, vocabulary=64, dropout=0.1)
    for check in CHECKS.values():
        verdict = check(Case(workload, device=torch.device(device), dtype=dtype))
        assert verdict.passed is not False, verdict


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return {"hidden": F.relu(self.frozen(F.relu(self.first(x)))), "count": len(x)}


def test_gates_hold_where_parameters_are_frozen_or_unused():
    workload = Workload(
        "branch",
        lambda: nn.ModuleDict({"layers": nn.ModuleList(Branch() for _ in range(2))}),
        lambda size: torch.randn(size, 8),
        lambda model, x: (
            model["layers"][1](model["layers"][0](x)["hidden"])["hidden"].square().sum()
        ),
    )
    for name, check in CHECKS.items():
        verdict = check(Case(workload))
        assert verdict.passed is not False, (name, verdict)


def test_a_model_without_blocks_has_nothing_to_recompute():
    workload = Workload(
        "flat",
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda size: torch.randn(size, 4),
        lambda m, x: m(x).sum(),
    )
    held = {gate.name: gate.run(Case(workload)).passed for gate in GATES}
    assert held == {
        name: None if name.endswith(("once", "held-bytes")) else True for name in CHECKS
    }


# The saboteurs.


@pytest.mark.parametrize("saboteur", faults("faulty_probes"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
