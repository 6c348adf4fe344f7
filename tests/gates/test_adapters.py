"""Gates on adapters, routers and small optimizers, and the faults of fine-tuning.

python -m pytest tests/gates/test_adapters.py
"""

import pytest
from faulty_fine_tuning import ADAPTED, CODED, ROUTED
from saboteurs import case_of, faults, gates


@pytest.mark.parametrize("name", ["recompute/parity-full", "recompute/routing"])
@pytest.mark.parametrize("workload", [ADAPTED, ROUTED], ids=lambda one: one.name)
def test_recompute_of_adapters_and_routers_holds(name, workload):
    verdict = gates()[name].check(case_of(workload))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("memory-plan/chunked-loss", ROUTED),
        ("memory-plan/estimate", CODED),
        ("grad-accum/in-backward", "small"),
        ("grad-accum/in-backward", "dropout"),
        ("grad-accum/in-backward", ROUTED),
    ],
)
def test_losses_estimates_and_steps_in_backward_hold(name, model):
    verdict = gates()[name].check(case_of(model))
    assert verdict.passed, verdict


def test_routing_does_not_apply_to_a_model_without_a_router():
    verdict = gates()["recompute/routing"].check(case_of("small"))
    assert verdict.passed is None
    assert "no block that recomputes has a router" in verdict.hint


@pytest.mark.parametrize("saboteur", faults("faulty_fine_tuning"), ids=str)
def test_a_fault_of_fine_tuning_is_caught(saboteur):
    saboteur.check()
