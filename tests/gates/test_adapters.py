"""Gates on adapters, routers and small optimizers, and the faults of fine-tuning.

python -m pytest tests/gates/test_adapters.py
"""

import pytest
from faulty_fine_tuning import ADAPTED, ROUTED, coded
from saboteurs import case_of, faults, gates

from curry_train.gates import chains, memory_plan, windows_by_hand
from curry_train.workloads.models import mlp
from curry_train.workloads.workload import Case


@pytest.mark.parametrize("name", ["recompute/parity-full", "recompute/routing"])
@pytest.mark.parametrize("workload", [ADAPTED, ROUTED], ids=lambda one: one.name)
def test_recompute_of_adapters_and_routers_holds(name, workload):
    verdict = gates()[name].check(case_of(workload))
    assert verdict.passed, verdict


def test_the_chunked_loss_of_a_model_with_a_routers_loss_holds():
    verdict = memory_plan.chunked_loss(case_of(ROUTED))
    assert verdict.passed, verdict


def test_the_estimate_of_an_optimizer_with_codes_of_one_byte_holds():
    verdict = memory_plan.estimate(Case(mlp(depth=2, width=64)), optimizer=coded)
    assert verdict.passed, verdict


@pytest.mark.parametrize("model", ["small", "dropout", ROUTED], ids=["small", "dropout", "routed"])
def test_a_step_in_backward_holds(model):
    verdict = windows_by_hand.stepped_in_backward(case_of(model))
    assert verdict.passed, verdict


def test_a_model_without_a_router_is_not_judged():
    verdict = chains.routing(case_of("small"))
    assert verdict.passed is None
    assert "no block that recomputes has a router" in verdict.hint


@pytest.mark.parametrize("saboteur", faults("faulty_fine_tuning"), ids=str)
def test_a_fault_of_fine_tuning_is_caught(saboteur):
    saboteur.check()
