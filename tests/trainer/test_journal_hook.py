"""The journal of a training run.

Run with `python -m pytest tests/trainer/test_journal_hook.py`.
"""

import pytest
from journals import lines_of

from curry_train.cli.train import open_named_run
from curry_train.config import load_config
from curry_train.runs.history import read_history
from curry_train.trainer import train_run

WORDS = (
    "model=training_models:tiny",
    "batch_size=4",
    "microbatch=2",
    "device=cpu",
    "evaluate={every: 4, samples: 4}",
)


def trained(runs, *words, resume=None, watch=()):
    with open_named_run(load_config(None, [f"runs={runs}", *WORDS, *words]), resume=resume) as run:
        return train_run(run, watch=watch)


def test_the_journal_has_the_facts_of_the_run_each_step_and_its_end(tmp_path):
    done = trained(tmp_path, "steps=6")
    lines = lines_of(done.folder)
    assert [line["kind"] for line in lines if line["kind"] != "save"] == [
        "start", "step", "step", "step", "step", "eval", "step", "step", "eval", "stop",
    ]  # fmt: skip
    saves = {
        line["checkpoint"].split("-")[-1]: line["num_bytes"]
        for line in lines
        if line["kind"] == "save"
    }
    assert set(saves) == {"00000004.dcp", "00000006.dcp"}
    assert all(size > 2**17 for size in saves.values())
    assert lines[0]["config"]["steps"] == 6
    assert lines[0]["environment"]["world_size"] == 1
    assert (lines[0]["run"], lines[-1]["reason"]) == ("run-001", "steps")
    last = [line for line in lines if line["kind"] == "step"][-1]
    report = done.report.last
    assert (last["loss"], last["grad_norm"], last["terms"]) == (
        report.loss,
        report.grad_norm,
        report.num_terms,
    )
    assert (last["learning_rate"], last["seconds"]) == (report.learning_rate, report.seconds)
    assert 0 < last["epoch"] < 1
    assert last["peak_bytes"] > 2**20
    assert [line["value"] for line in lines if line["kind"] == "eval"][-1] == report.dev_loss


def test_a_resume_is_a_new_attempt_of_the_same_journal(tmp_path):
    folder = trained(tmp_path, "steps=4").folder
    trained(tmp_path, "steps=6", "optimizer.learning_rate=1e-4", resume="latest")
    history = read_history(folder)
    assert [(a.number, a.kind, a.step, a.ended) for a in history.attempts] == [
        (1, "start", 0, "steps"),
        (2, "resume", 4, "steps"),
    ]
    assert list(history.steps.step) == [1, 2, 3, 4, 5, 6]
    assert history.facts["config"]["optimizer"]["learning_rate"] == 1e-4


def test_an_error_is_recorded_as_the_reason_of_the_end(tmp_path):
    def fail(report):
        raise ZeroDivisionError("at step 2")

    class Failing:
        def __init__(self, run): ...

        def __enter__(self):
            return lambda report: fail(report) if report.step == 2 else None

        def __exit__(self, *raised): ...

    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, "steps=6", watch=(Failing,))
    last = lines_of(tmp_path / "run-001")[-1]
    assert (last["kind"], last["step"], last["reason"]) == (
        "stop",
        2,
        "ZeroDivisionError: at step 2",
    )


def test_a_step_that_the_scaler_skipped_is_in_the_journal(tmp_path):
    with open_named_run(load_config(None, [f"runs={tmp_path}", *WORDS])) as run:
        figures = {"grad_norm": float("inf"), "terms": 8}
        run.attached.step(loss=4.0, stepped=False, figures=figures)
    step, skip = lines_of(run.folder)[1:3]
    assert (step["grad_norm"], skip["kind"], skip["step"]) == ("inf", "skip", 1)
