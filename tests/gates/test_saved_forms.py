"""Tests of the gates of saved state in all forms: they hold, and fail on planted faults.

python -m pytest tests/gates/test_saved_forms.py
"""

import logging

import pytest
from saboteurs import case_of, faults

from curry_train.gates.checkpoint_policy import RETENTION_GATES
from curry_train.gates.saved_forms import FORMS_GATES
from curry_train.gates.verdict import attributes_set, judged_by, unlike, unrefused, warnings_read


@pytest.mark.parametrize("gate", [*FORMS_GATES, *RETENTION_GATES[1:2]], ids=lambda gate: gate.name)
def test_gates_hold_on_the_right_implementation(gate):
    verdict = gate.run(case_of("small"))
    assert verdict.passed, verdict


@pytest.mark.parametrize("saboteur", faults("faulty_forms"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()


def test_a_trial_that_is_wrong_or_warns_of_nothing_is_named():
    def warns(folder):
        logging.getLogger("curry_train.runs.lock").warning("taking over %s", None)
        return ""

    table = {"right": lambda folder: "", "wrong": lambda folder: "too few", "warns": warns}
    verdict = judged_by("recompute/off", table, hint="do better")
    assert verdict.passed is False
    assert verdict.measured == "1 of 3 forms right"
    assert verdict.hint == "wrong: too few; do better"
    only = judged_by("recompute/off", {"warns": warns}, hint="do better")
    assert "a warning names nothing: taking over None" in only.hint


def test_warnings_are_read_and_nobody_else_hears_them(caplog):
    with warnings_read() as texts:
        logging.getLogger("curry_train.runs.lock").warning("of %s", 5)
    assert texts == ["of 5"]
    assert caplog.text == ""


def test_an_error_has_to_be_of_its_kind_and_name_what_is_wrong():
    def refuse():
        raise ValueError("wrong batch_size")

    assert unrefused(ValueError, refuse, "batch_size") == ""
    assert "does not name step" in unrefused(ValueError, refuse, "batch_size", "step")
    assert "ValueError instead of KeyError" in unrefused(KeyError, refuse)
    assert unrefused(KeyError, list) != ""


def test_values_are_compared_with_their_types_and_attributes_are_set_back():
    assert unlike("it", {"a": [1, None]}, {"a": [1, None]}) == ""
    assert unlike("it", {"a": 1}, {"a": 1.0}).startswith("it")
    assert unlike("it", [1], [1, 2]) == "it is [1], not [1, 2]"
    with attributes_set(logging, BASIC_FORMAT="x"):
        assert logging.BASIC_FORMAT == "x"
    assert logging.BASIC_FORMAT != "x"
