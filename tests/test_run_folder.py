"""Folders of runs: numbered, never shared, and found again. `python -m pytest tests/test_run_folder.py`."""

import pytest

from curry_train.config import load_config
from curry_train.run_folder import new_run, note_resumed, state_to_resume


def config(tmp_path, *words):
    return load_config(None, [f"runs={tmp_path}/runs", *words])


def saved(folder, step):
    (folder / "recovery").mkdir(exist_ok=True)
    path = folder / f"recovery/step-{step:08d}.pt"
    path.touch()
    return path


def test_runs_of_a_name_are_numbered_after_the_highest(tmp_path):
    first = new_run(config(tmp_path))
    (tmp_path / "runs/run-999").mkdir()
    (tmp_path / "runs/running-2000").mkdir()
    assert [first.name, new_run(config(tmp_path)).name] == ["run-001", "run-1000"]
    assert load_config(first / "config.yaml") == config(tmp_path)


def test_latest_is_the_newest_run_of_the_name_that_has_a_state(tmp_path):
    runs = [new_run(config(tmp_path)) for _ in range(3)]
    saved(runs[0], 90)
    wanted = saved(runs[1], 100)
    saved(runs[1], 20)
    saved(new_run(config(tmp_path, "name=other")), 5)
    assert state_to_resume(config(tmp_path), "latest") == wanted
    assert state_to_resume(config(tmp_path), "run-001").name == "step-00000090.pt"
    assert state_to_resume(config(tmp_path), str(runs[0])).name == "step-00000090.pt"
    assert state_to_resume(config(tmp_path), str(wanted)) == wanted


def test_what_is_not_there_is_told_with_what_is(tmp_path):
    with pytest.raises(ValueError, match=r"no saved state to resume from for 'latest': no run in .*runs has one"):
        state_to_resume(config(tmp_path), "latest")
    saved(new_run(config(tmp_path)), 1)
    with pytest.raises(ValueError, match=r"for 'run-7': .*runs has run-001"):
        state_to_resume(config(tmp_path), "run-7")


def test_another_configuration_is_kept_beside_the_first(tmp_path):
    folder = new_run(config(tmp_path))
    note_resumed(folder, config(tmp_path), step=5)
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    note_resumed(folder, config(tmp_path, "steps=9"), step=5)
    assert load_config(folder / "config-from-step-00000005.yaml").steps == 9
