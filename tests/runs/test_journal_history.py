"""The history of a run takes each step from its last attempt.

python -m pytest tests/runs/test_journal_history.py
"""

import pytest

from curry_train.runs import Journal, read_history

from ..journals import plant_eventful


def test_a_history_up_to_an_attempt_is_the_run_at_that_time():
    folder = plant_eventful("run")
    second = read_history(f"{folder}@2")
    assert list(second.steps.step) == list(range(1, 31))
    assert len(second.attempts) == 2
    assert list(read_history(f"{folder}/journal.jsonl@1").steps.step) == list(range(1, 21))
    with pytest.raises(ValueError, match="has no attempt 4: the last one is 3"):
        read_history(f"{folder}@4")
    folder.rename("run@2")  # a name given by the user comes first
    assert len(read_history("run@2").attempts) == 3


def test_dev_metrics_of_rolled_back_steps_are_dropped(tmp_path):
    with Journal(tmp_path) as journal:
        for step in (10, 20):
            journal.write("eval", step=step, metric="dev_loss", value=float(step))
        journal.write("rollback", step=10, from_step=20, reason="x")
        # Of a step that is measured twice the later figure counts.
        for value in (4.0, 5.0):
            journal.write("eval", step=30, metric="dev_loss", value=value)
    steps = read_history(tmp_path).metrics["dev_loss"]
    assert (list(steps.step), list(steps.values["value"])) == ([10, 30], [10.0, 5.0])
    assert list(steps.superseded[0].values["value"]) == [20.0]
