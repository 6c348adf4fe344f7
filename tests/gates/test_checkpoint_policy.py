"""Gates of the checkpoint policy find what no checkpoint restores.

python -m pytest tests/gates/test_checkpoint_policy.py
"""

from dataclasses import replace

import torch
from torch import nn

from curry_train.gates import discover
from curry_train.gates.first_look import explain_failure, look
from curry_train.workloads import Case, load_workload

from ..saboteurs.saboteurs import gates, require
from .constructs import counted_in_python


def test_what_the_model_keeps_outside_of_its_state_is_found():
    verdict = gates()["checkpoint-policy/bitwise"].run(Case(counted_in_python()))
    require(verdict, False, "not in its state_dict()")


def scheduled(model):
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return optimizer


def test_an_optimizer_with_a_schedule_is_judged_without_it():
    workload = replace(load_workload("mlp"), optimizer=scheduled)
    require(gates()["checkpoint-policy/bitwise"].run(Case(workload)), True)


class Function(nn.Linear):
    """Has a function in its state, which no checkpoint holds."""

    def __init__(self):
        super().__init__(8, 8)

    def get_extra_state(self):
        return print

    def set_extra_state(self, state):
        pass


def function():
    return Function(), torch.randn(4, 8)


def test_a_state_that_no_checkpoint_holds_does_not_apply_with_the_cause():
    case = Case(load_workload(f"{__file__}:function"))
    findings = look(case)
    for gate in discover(["checkpoint-policy"]):
        require(explain_failure(gate.run(case), findings), None, "_extra_state")
