"""Gates hold on the built-in models in both precisions and on two ranks, and catch planted faults.

python -m pytest tests/gates/test_gates.py
"""

import gc
from dataclasses import replace

import pytest
import torch

from curry_train.gates import discover
from curry_train.gates.implementation import load_implementation
from curry_train.gates.verdict import TECHNIQUES, drop_shared_results
from curry_train.workloads import Case, load_workload
from curry_train.workloads.models import BUILTIN_WORKLOADS

from ..saboteurs.faulty_routing import ROUTED
from ..saboteurs.saboteurs import CASES, case_of, faults, gates, require
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
SLOW_GATES = (
    "recompute/budget",
    "memory-plan/estimate",
    "memory-plan/fits",
    "memory-plan/parity-plan",
)


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
    counts = []
    for _ in range(2):
        for name in (
            "bench/same",
            "grad-accum/equal",
            "grad-flow/same-training",
            "recompute/parity-full",
        ):
            gates()[name].run(case_of("small"))
        drop_shared_results()
        gc.collect()
        counts.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    assert counts[1] <= counts[0]


# Two ranks.


GATES = ("recompute/two-ranks", "checkpoint-policy/two-ranks")


@pytest.mark.parametrize("gate", GATES)
def test_gates_hold_in_half_precision(gate):
    verdict = gates()[gate].run(Case(load_workload("shrink=2:transformer"), dtype=torch.bfloat16))
    assert verdict.passed, verdict
    assert "not compared" not in verdict.measured


@pytest.mark.parametrize("gate", GATES)
def test_a_workload_without_a_name_is_not_applicable(gate):
    verdict = gates()[gate].run(Case(replace(load_workload("mlp"), spec="")))
    require(verdict, None, "by which other processes could load it")


def test_a_workload_is_loaded_as_without_a_launcher(tmp_path):
    """As by a trainer, which gives each rank of a launcher another part of the data."""
    (tmp_path / "launched.py").write_text(
        "import os, torch\n"
        "def build():\n"
        "    part = float(os.environ.get('RANK', 7))\n"
        "    layers = [torch.nn.Linear(4, 4) for _ in range(2)]\n"
        "    return torch.nn.Sequential(*layers), torch.ones(8, 4) * part\n"
    )
    case = case_of(f"{tmp_path}/launched.py:build")
    require(gates()["checkpoint-policy/two-ranks"].run(case), True)


def test_an_error_on_the_ranks_is_one_line_and_names_the_users_own(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import torch.distributed as dist\n"
        "def recompute_blocks(model, *, blocks):\n"
        "    if dist.is_initialized():\n"
        "        raise RuntimeError('not on ranks\\nas torch goes on')\n"
    )
    given = load_implementation(f"{wrong}:recompute_blocks")
    verdict = gates()["recompute/two-ranks"].run(case_of("mlp"), [given])
    assert verdict.passed is False
    assert verdict.measured == "raised on a rank: RuntimeError: not on ranks"
    assert verdict.hint.startswith(f"correct your {wrong}, line 4: raise RuntimeError(")
