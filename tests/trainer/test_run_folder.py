"""Folders of runs: numbered, never shared, and found again.

Run with `python -m pytest tests/trainer/test_run_folder.py`.
"""

import torch

from curry_train.config import load_config
from curry_train.runs import Store, TrainingState
from curry_train.trainer import new_run, run_folder


def config(tmp_path, *words):
    return load_config(None, [f"runs={tmp_path}/user@host/runs", *words])


def saved(folder, step):
    with Store(folder) as store:
        state = TrainingState(torch.nn.Linear(1, 1))
        state.step = step
        store.save("recovery", step, state)


def test_runs_of_a_name_are_numbered_after_the_highest(tmp_path):
    words = ("recompute.strategy=full", "recompute.exclude_patterns=[head]", "data.length=32")
    first = new_run(config(tmp_path, *words))
    (first.parent / "run-999").mkdir()
    (first.parent / "running-2000").mkdir()
    assert [first.name, new_run(config(tmp_path)).name] == ["run-001", "run-1000"]
    assert load_config(first / "config.yaml") == config(tmp_path, *words)


def test_latest_is_the_newest_run_of_the_name_that_has_a_state(tmp_path):
    first, second, _ = (new_run(config(tmp_path)) for _ in range(3))
    saved(first, 90)
    saved(second, 100)
    other = new_run(config(tmp_path, "name=o@ther"))
    saved(other, 5)
    for text, found in {
        "latest": (second, "latest"),
        "run-001": (first, "latest"),
        str(first): (first, "latest"),
        "o@ther-001": (other, "latest"),
        f"{first}@90": (first, "90"),
        str(second / "recovery/step-00000100.dcp"): (second, "recovery/step-00000100.dcp"),
    }.items():
        assert run_folder(config(tmp_path), text) == found


def test_resuming_from_the_best_parameters_starts_a_new_run(tmp_path):
    folder = new_run(config(tmp_path))
    saved(folder, 1)
    wanted = folder.with_name("run-002"), f"{folder}@best"
    assert run_folder(config(tmp_path), "run-001@best") == wanted
