"""Folders of runs: numbered, never shared, and found again.

Run with `python -m pytest tests/trainer/test_run_folder.py`.
"""

import pytest
import torch

from curry_train.config import load_config
from curry_train.runs import Store, TrainingState
from curry_train.trainer import new_run, note_resumed, run_to_resume


def config(tmp_path, *words):
    return load_config(None, [f"runs={tmp_path}/runs", *words])


def saved(folder, step):
    with Store(folder) as store:
        state = TrainingState(torch.nn.Linear(1, 1))
        state.step = step
        store.save("recovery", step, state)


def test_runs_of_a_name_are_numbered_after_the_highest(tmp_path):
    first = new_run(config(tmp_path))
    (tmp_path / "runs/run-999").mkdir()
    (tmp_path / "runs/running-2000").mkdir()
    assert [first.name, new_run(config(tmp_path)).name] == ["run-001", "run-1000"]
    assert load_config(first / "config.yaml") == config(tmp_path)


def test_latest_is_the_newest_run_of_the_name_that_has_a_state(tmp_path):
    runs = [new_run(config(tmp_path)) for _ in range(3)]
    saved(runs[0], 90)
    saved(runs[1], 100)
    saved(new_run(config(tmp_path, "name=other")), 5)
    assert run_to_resume(config(tmp_path), "latest") == (runs[1], "latest")
    assert run_to_resume(config(tmp_path), "run-001") == (runs[0], "latest")
    assert run_to_resume(config(tmp_path), str(runs[0])) == (runs[0], "latest")
    assert run_to_resume(config(tmp_path), "run-001@90") == (runs[0], "90")
    assert run_to_resume(config(tmp_path), str(runs[1] / "recovery/step-00000100.dcp")) == (
        runs[1],
        "100",
    )


def test_a_run_below_a_folder_with_an_at_sign_is_resumed(tmp_path):
    folder = tmp_path / "user@host" / "run-001"
    saved(folder, 90)
    assert run_to_resume(config(tmp_path), str(folder)) == (folder, "latest")
    assert run_to_resume(config(tmp_path), f"{folder}@90") == (folder, "90")


def test_resuming_from_the_best_parameters_starts_a_new_run(tmp_path):
    folder = new_run(config(tmp_path))
    saved(folder, 1)
    assert run_to_resume(config(tmp_path), "run-001@best") == (None, f"{folder}@best")


def test_a_missing_run_or_step_is_answered_with_the_existing_ones(tmp_path):
    with pytest.raises(
        ValueError, match=r"no run of run in .*runs has a saved state to resume from"
    ):
        run_to_resume(config(tmp_path), "latest")
    saved(new_run(config(tmp_path)), 1)
    with pytest.raises(ValueError, match=r"no run run-7; did you mean run-001\?"):
        run_to_resume(config(tmp_path), "run-7")
    saved(new_run(config(tmp_path, "name=night")), 1)
    with pytest.raises(
        ValueError,
        match=r"no run nigth-001; did you mean night-001\? .*runs has night-001, run-001",
    ):
        run_to_resume(config(tmp_path), "nigth-001@5")


def test_a_changed_configuration_is_saved_beside_the_first(tmp_path):
    folder = new_run(config(tmp_path))
    note_resumed(folder, config(tmp_path), step=5)
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    note_resumed(folder, config(tmp_path, "steps=9"), step=5)
    assert load_config(folder / "config-from-step-00000005.yaml").steps == 9
