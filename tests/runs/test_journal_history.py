"""The history of a run takes each step from its last attempt.

python -m pytest tests/runs/test_journal_history.py
"""

import math

import pytest
from journals import facts, loss_of, plant, plant_eventful, train

from curry_train.runs.history import MOST_WHOLE_EVENTS, read_history
from curry_train.runs.journal import Journal, encode_event


def by_step(steps):
    return dict(zip(steps.step, zip(steps.values["loss"], steps.attempt, strict=True), strict=True))


def test_each_attempt_counts_up_to_the_start_of_the_next(tmp_path):
    """Leave out steps 21 to 30 of attempt 2, which were given up, or two trainings would mix."""
    history = read_history(plant_eventful(tmp_path / "run"))
    found = by_step(history.steps)
    assert list(found) == list(range(1, 41))
    for step, (loss, attempt) in found.items():
        expected = (0.0, 1) if step <= 10 else (0.001, 2) if step <= 20 else (0.002, 3)
        assert (loss, attempt) == (loss_of(step) + expected[0], expected[1])
    given_up = [
        (part.step[0], part.step[-1], part.attempt[0]) for part in history.course.superseded
    ]
    assert given_up == [(11, 20, 1), (21, 30, 2)]


def test_a_resumed_run_has_only_the_steps_that_it_repeated(tmp_path):
    """Leave out steps 16 to 20 of the first attempt, which did not shape the current weights."""
    folder = plant(tmp_path / "run", last=20)
    with Journal(folder) as journal:
        journal.resume(10)
        assert list(read_history(folder).steps.step) == list(range(1, 11))
        train(journal, range(11, 16))
    assert list(read_history(folder).steps.step) == list(range(1, 16))


def test_attempts_have_their_start_and_end(tmp_path):
    history = read_history(plant_eventful(tmp_path / "run"))
    found = [
        (a.number, a.kind, a.step, a.num_steps, a.last_step, a.ended) for a in history.attempts
    ]
    assert found == [
        (1, "start", 0, 20, 20, None),
        (2, "rollback", 10, 20, 30, None),
        (3, "resume", 20, 20, 40, "steps"),
    ]
    assert history.facts["config"]["steps"] == 40
    assert (history.run, history.last_step, history.num_damaged, history.torn) == (
        "run",
        40,
        0,
        False,
    )
    assert list(history.marks["save"].step) == [10, 20, 20, 30, 30, 40]
    assert history.marks["spike"].events[0].facts["reason"] == "9 after 4.05"


def test_a_history_up_to_an_attempt_is_the_run_at_that_time(tmp_path):
    folder = plant_eventful(tmp_path / "run")
    second = read_history(f"{folder}@2")
    assert list(second.steps.step) == list(range(1, 31))
    assert len(second.attempts) == 2
    assert list(read_history(f"{folder}/journal.jsonl@1").steps.step) == list(range(1, 21))
    with pytest.raises(ValueError, match="has no attempt 4: the last one is 3"):
        read_history(f"{folder}@4")
    folder.rename(tmp_path / "run@2")  # a name given by the user comes first
    assert len(read_history(tmp_path / "run@2").attempts) == 3


def test_an_attempt_without_its_first_event_still_counts(tmp_path):
    folder = plant(tmp_path / "run", last=20)
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(b"torn\n")
        for step in (11, 12):
            file.write(encode_event("step", {"loss": 1.0}, time=1.0, step=step, attempt=2))
    history = read_history(folder)
    assert [(a.number, a.kind, a.step, a.num_steps) for a in history.attempts] == [
        (1, "start", 0, 20),
        (2, "lost", 10, 2),
    ]
    assert list(history.steps.step) == list(range(1, 13))
    assert (history.num_damaged, history.first_damaged) == (1, 25)


def test_steps_that_go_back_without_a_rollback_event_are_read(tmp_path):
    """Read a loop that records no rollback; the last value of a step counts."""
    with Journal(tmp_path, run="run") as journal:
        journal.start()
        train(journal, [1, 2, 3, 2, 3, 3, 4], loss=float)
    history = read_history(tmp_path)
    assert list(history.steps.step) == [1, 2, 3, 4]
    assert [list(part.step) for part in history.course.superseded] == [[2, 3], [3]]


def test_missing_or_non_finite_figures_are_accepted(tmp_path):
    with Journal(tmp_path, run="run") as journal:
        journal.start()
        journal.step(1, loss=math.nan, learning_rate=1e-3)
        journal.step(2, loss=math.inf, learning_rate=1e-3, peak_bytes=5)
        journal.write("eval", step=2, metric="dev_loss", value=math.inf)
        journal.write("eval", step=2)
    history = read_history(tmp_path)
    losses, peaks = history.steps.values["loss"], history.steps.values["peak_bytes"]
    assert math.isnan(losses[0])
    assert losses[1] == math.inf
    assert math.isnan(peaks[0])
    assert peaks[1] == 5.0
    assert list(history.metrics["dev_loss"].steps.values["value"]) == [math.inf]


def test_dev_metrics_of_rolled_back_steps_are_dropped(tmp_path):
    with Journal(tmp_path, run="run") as journal:
        journal.start()
        for step in (10, 20):
            journal.write("eval", step=step, metric="dev_loss", value=float(step))
        journal.rollback(10, from_step=20, reason="x")
        journal.write("eval", step=20, metric="dev_loss", value=5.0)
    course = read_history(tmp_path).metrics["dev_loss"]
    assert (list(course.steps.step), list(course.steps.values["value"])) == ([10, 20], [10.0, 5.0])
    assert list(course.superseded[0].values["value"]) == [20.0]


def test_the_run_that_it_was_resumed_from_is_known(tmp_path):
    with Journal(tmp_path, run="second") as journal:
        journal.resume(500, facts={**facts(), "from_run": "first"})
    history = read_history(tmp_path)
    assert [(a.from_run, a.run, a.step) for a in history.attempts] == [("first", "second", 500)]
    assert len(history.steps) == 0


def test_a_limited_number_of_events_is_kept_and_all_are_counted(tmp_path):
    with Journal(tmp_path, run="run") as journal:
        journal.start()
        for step in range(MOST_WHOLE_EVENTS + 50):
            journal.write("skip", step=step)
    marks = read_history(tmp_path).marks["skip"]
    assert (len(marks.step), len(marks.events)) == (MOST_WHOLE_EVENTS + 50, MOST_WHOLE_EVENTS)


def test_a_save_that_is_recorded_late_is_not_a_rollback(tmp_path):
    """Accept a background save of step 4 that is committed after step 6."""
    with Journal(tmp_path) as journal:
        journal.start()
        train(journal, range(1, 7))
        journal.write("save", step=4, checkpoint="rollback/step-00000004.dcp")
    assert read_history(tmp_path).last_step == 6
