"""A cause that several gates share explains their failures, and is printed once.

python -m pytest tests/gates/test_first_look.py
"""

import math

import pytest
from torch import nn

from curry_train.gates import Verdict
from curry_train.gates.first_look import FailureCause, explain_failure, look
from curry_train.gates.recompute import compare_inactive
from curry_train.workloads import Case

from ..command_runs import flat, ran, read_json
from ..plan_models import squares
from ..saboteurs.saboteurs import verdict_of
from . import constructs


@pytest.mark.parametrize("make", [constructs.counted_in_python, constructs.noisy_loss])
def test_recompute_off_judges_models_whose_calls_differ(make):
    assert verdict_of(compare_inactive, Case(make())).passed


def test_a_loss_that_is_not_a_number_is_no_state():
    assert not look(
        Case(squares(lambda: nn.Linear(4, 4), 4, loss=lambda *of: of[0](of[1]).sum() * math.nan))
    )


def test_only_a_failure_is_explained():
    finding = FailureCause("the cause", ("sac/*",))
    failed = Verdict("sac/products", False, "1", "2", "mend it")
    explained = explain_failure(failed, [finding])
    assert (explained.passed, explained.hint) == (None, "the cause")
    held = Verdict("sac/products", True, "2", "2")
    assert explain_failure(held, [finding]) is held
    other = Verdict("recompute/off", False, "1", "2", "mend it")
    assert explain_failure(other, [finding]) is other


def test_a_failure_for_another_reason_is_not_explained_by_sparse_gradients():
    (finding,) = look(Case(constructs.sparse()))
    of_adamw = Verdict(
        "loss-spike/found", False, "raised RuntimeError: no Sparse gradients", "to run", "x"
    )
    assert explain_failure(of_adamw, [finding]).passed is None
    lost = Verdict("checkpoint-policy/bitwise", False, "3 of 120 values equal", "120", "save all")
    assert explain_failure(lost, [finding]) is lost


def test_validate_prints_a_cause_once_and_gates_that_hold_stay_held(tmp_path):
    gates = "--gate sac/parity-regions --gate checkpoint-policy/bitwise --gate recompute/off"
    path = tmp_path / "a.json"
    ended = ran("validate --model tests.gates.constructs:own_generator", gates, "--json", path)
    output, data = flat(ended.output), read_json(path)
    assert output.count("layers.0.generator to layers.2.generator: state stays") == 1
    assert "1 held, 0 failed, 2 not applicable" in output
    assert output.count("n/a: cause 1") == 2
    (found,) = data["findings"]["own_generator"]
    assert [row["hint"] for row in data["results"] if not row["passed"]] == [found["text"]] * 2
