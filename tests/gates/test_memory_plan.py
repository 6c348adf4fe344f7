"""Gates of the memory plan allow rounding and no more, and need shapes.

python -m pytest tests/gates/test_memory_plan.py
"""

from dataclasses import replace

import torch

from curry_train.primitives import chunked_cross_entropy, chunked_loss
from curry_train.workloads import Case, load_workload

from ..plan_models import ROUTED
from ..saboteurs.saboteurs import gates, require


def leave_out_a_token(rows, weight, targets, **options):
    return chunked_cross_entropy(rows[:-1], weight, targets[:-1], **options)


def test_float32_may_round_the_gradients_of_sure_predictions_and_no_more(monkeypatch):
    run = gates()["memory-plan/chunked-loss"].run
    for seed in range(4):
        case = Case(load_workload("tests.gates.constructs:tied_words"), seed=seed)
        require(run(case), True)
    monkeypatch.setattr(chunked_loss, "chunked_cross_entropy", leave_out_a_token)
    require(run(case), False)


def test_an_optimizer_that_needs_a_closure_has_no_estimate():
    workload = replace(load_workload("mlp"), optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    require(gates()["memory-plan/estimate"].run(Case(workload)), None, "LBFGS needs a closure")


def test_a_model_whose_shapes_need_values_has_no_estimate():
    verdict = gates()["memory-plan/estimate"].run(Case(ROUTED))
    require(verdict, None, "nonzero")
    assert "Runs" in verdict.hint
