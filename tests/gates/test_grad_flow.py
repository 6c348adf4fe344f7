"""Tests of the grad-flow gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_grad_flow.py
"""

import odd_models
import pytest
import torch
from saboteurs import faults
from torch import nn
from torch.nn import functional as F

from curry_train.gates import grad_flow
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

# On two ranks they run on a workload of each kind alone.
GATES = {gate.name.partition("/")[2]: gate for gate in grad_flow.GATES}
IN_PROCESS = [name for name in GATES if name != "two-ranks"]


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.parametrize("model", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(model, name):
    verdict = GATES[name].run(Case(load_workload(model)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    workload = transformer(depth=2, dim=32, length=16, vocabulary=64, dropout=0.1)
    for name in IN_PROCESS:
        verdict = GATES[name].run(Case(workload, device=torch.device(device), dtype=dtype))
        assert verdict.passed is not False, verdict


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return {"hidden": F.relu(self.frozen(F.relu(self.first(x)))), "count": len(x)}


def branches(model, x):
    for layer in model["layers"]:
        x = layer(x)["hidden"]
    return x.square().sum()


def test_gates_hold_where_parameters_are_frozen_or_unused():
    def build():
        return nn.ModuleDict({"layers": nn.ModuleList(Branch() for _ in range(2))})

    case = Case(Workload("branch", build, odd_models.make_batch, branches))
    for name in IN_PROCESS:
        verdict = GATES[name].run(case)
        assert verdict.passed is not False, (name, verdict)


def test_a_model_without_blocks_has_nothing_to_recompute():
    workload = Workload(
        "flat",
        lambda: nn.Sequential(nn.Linear(8, 8)),
        odd_models.make_batch,
        odd_models.squared_sum,
    )
    held = {name: GATES[name].run(Case(workload)).passed for name in IN_PROCESS}
    assert held == {"exact": True, "once": None, "same-training": True, "held-bytes": None}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("model", ["counting", "counting_in_python", "derived"])
def test_gates_hold_on_models_of_unusual_form(model, name):
    verdict = GATES[name].run(odd_models.case_of(model))
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", GATES)
def test_a_model_that_can_not_be_probed_is_named(name):
    verdict = GATES[name].run(odd_models.case_of("parallel"))
    assert verdict.passed is None
    assert "DataParallel runs replicas of the model" in verdict.hint


def test_a_model_whose_count_enters_the_output_is_not_compared_on_ranks():
    verdict = GATES["two-ranks"].run(odd_models.case_of("counted"))
    assert verdict.passed is None
    assert "such as 0.calls" in verdict.hint


@pytest.mark.parametrize("saboteur", faults("faulty_probes"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
