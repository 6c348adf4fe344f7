"""Gates on two ranks hold in half precision, and load a workload by its name.

python -m pytest tests/gates/test_two_ranks.py
"""

from dataclasses import replace

import pytest
import torch

from curry_train.gates.implementation import load_implementation
from curry_train.workloads import Case, load_workload

from ..saboteurs.saboteurs import case_of, gates, require

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
