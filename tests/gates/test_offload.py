"""Gates of offload and of the compiler's memory budget name what they don't apply to.

python -m pytest tests/gates/test_offload.py
"""

import pytest
from torch import nn

from curry_train import primitives
from curry_train.gates.recompute import compare_budget, compare_freed_bytes, compare_offload
from curry_train.workloads import Case, Workload
from curry_train.workloads.models import transformer

from ..compiled_models import TRACING, build, hidden, loss, rows
from ..plan_models import squares
from ..saboteurs.saboteurs import case_of, require, verdict_of

pytestmark = TRACING
CHECKS = (compare_offload, compare_freed_bytes)


@pytest.mark.parametrize("check", CHECKS)
def test_gates_hold_for_a_single_block_and_do_not_apply_to_small_ones(check):
    assert verdict_of(check, Case(transformer(), blocks="layers.1")).passed
    assert verdict_of(check, Case(transformer(), blocks="layers.*.attention_norm")).passed


def saved_outside():
    """Layers whose inputs are saved by the activations between them too."""
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(32, 32), nn.ReLU())))


@pytest.mark.parametrize("check", CHECKS)
def test_offload_of_what_is_saved_outside_of_the_blocks_too_is_not_applicable(check):
    case = Case(squares(saved_outside, 32), blocks="[024]", batch_size=40)
    require(verdict_of(check, case), None, "saved outside of them too")


def test_a_budget_does_not_apply_where_nothing_can_be_compiled():
    case = Case(Workload("hidden", lambda: build(hidden()), rows, loss))
    require(verdict_of(compare_budget, case), None, "nothing of them is compiled")


def test_an_error_of_a_budget_alone_stays_one(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("only this implementation fails")

    monkeypatch.setattr(primitives, "memory_budget", broken)
    with pytest.raises(RuntimeError, match="only this implementation fails"):
        compare_budget(case_of("mlp"))
