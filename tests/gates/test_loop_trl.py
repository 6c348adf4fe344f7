"""Trainers of TRL are checked as they are: right ones pass, and each fault is found.

Run: `python -m pytest tests/gates/test_loop_trl.py`, or `make long`, which installs TRL.
"""

from pathlib import Path

import pytest

from curry_train.gates.loop_run import preflight_program

REASON = "TRL is not installed here: `make long` runs this test in .venv/finetune"
TRAINERS = Path(__file__).with_name("trl_trainers.py")

# By the function that makes the trainer: the checks that fail.
FAILED = {
    "tuned": set(),
    "preferring": set(),
    "rewarding": set(),
    "group_relative": set(),
    "padding_counts": {"targets"},
    "trains_its_reference": {"moves"},
}


@pytest.mark.parametrize("name", FAILED)
def test_a_trainer_of_trl_is_checked(tmp_path, monkeypatch, name):
    pytest.importorskip("trl", reason=REASON)
    monkeypatch.chdir(tmp_path)
    verdicts = preflight_program("trainer", [f"{TRAINERS}:{name}"], num_steps=4)
    failed = {one.gate.removeprefix("loop/") for one in verdicts if one.passed is False}
    assert failed == FAILED[name]
    assert [*tmp_path.iterdir()] == []
