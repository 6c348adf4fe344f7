"""Gates run and hold on the built-in models in both precisions, and catch planted faults.

python -m pytest tests/gates/test_gates.py
"""

import gc

import pytest
import torch

from curry_train.gates import discover
from curry_train.gates.verdict import TECHNIQUES, drop_shared_results
from curry_train.workloads import Case
from curry_train.workloads.models import BUILTIN_WORKLOADS

from ..saboteurs.faulty_routing import ROUTED
from ..saboteurs.saboteurs import CASES, case_of, faults, gates
from ..toy_steps import ON_DEVICES

# Gates that need not apply, by model.
NOT_ON = {
    "mlp": ["snn-timesteps", "memory-plan", "recompute/parity-sequential", "sac/products"],
    "transformer": ["snn-timesteps"],
    "resnet": ["snn-timesteps", "memory-plan/chunked", "sac"],
    "snn": ["memory-plan", "recompute", "sac"],
}


assert set(NOT_ON) == set(BUILTIN_WORKLOADS)


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("name", NOT_ON)
def test_gates_hold_on_built_in_models(name, technique):
    # Two layers show the same as four.
    case = case_of(f"shrink=2:{name}" if name == "transformer" else name)
    for gate in discover([technique]):
        verdict = gate.run(case)
        may_not_apply = gate.name.startswith((*NOT_ON[name], "recompute/routing"))
        assert verdict.passed or (verdict.passed is None and may_not_apply), verdict
        # A check that runs nothing of the user's is a test of this package.
        assert verdict.ran or not verdict.passed, verdict


# They take as long as all the others together.
SLOW_GATES = ("recompute/budget", "memory-plan/estimate", "memory-plan/fits")
SLOW_GATES += ("memory-plan/parity-plan",)


@pytest.mark.parametrize("technique", TECHNIQUES)
@ON_DEVICES
@pytest.mark.parametrize("length", ["short", "long"])
def test_no_gate_fails_with_dropout_in_half_precision(device, technique, length):
    case = Case(CASES["dropout"], device=torch.device(device), dtype=torch.bfloat16)
    for gate in discover([technique]):
        if not gate.name.endswith("two-ranks") and (length == "long") is (gate.name in SLOW_GATES):
            verdict = gate.run(case)
            assert verdict.passed is not False, verdict


@pytest.mark.parametrize("saboteur", faults(), ids=str)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_planted_fault_is_caught(saboteur):
    saboteur.check()


def test_the_gate_of_routing_holds_on_a_routed_model():
    assert gates()["recompute/routing"].run(Case(ROUTED)).passed


def test_gates_leave_no_tensor_behind():
    def count_tensors():
        drop_shared_results()
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    counts = []
    for _ in range(2):
        for name in (
            "bench/same",
            "grad-accum/equal",
            "grad-flow/same-training",
            "recompute/parity-full",
        ):
            gates()[name].run(case_of("small"))
        counts.append(count_tensors())
    assert counts[1] <= counts[0]
