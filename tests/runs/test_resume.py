"""Resuming from latest, a step, best or another run, and from damage.

python -m pytest tests/runs/test_resume.py
"""

import shutil

import pytest
import torch

from curry_train.runs import (
    DamagedCheckpoint,
    HostileCheckpoint,
    PolicyConfig,
    SavedRun,
    StateMismatch,
    Store,
)
from curry_train.runs.resume import NothingSaved, choose, load_chosen

from ..store_models import equal, flip_largest, new_state, save_best, tensors_of, train


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """Save rollbacks 9, 10, 100, recoveries 10, 50 and two best; return the content of each."""
    state, held = new_state(), {}
    folder = tmp_path_factory.mktemp("saved")
    with Store(folder) as store:
        for step in (9, 10, 50, 100):
            train(state, 1)
            state.step = step
            held[step] = tensors_of(state)
            for kind, steps in (("rollback", (9, 10, 100)), ("recovery", (10, 50))):
                if step in steps:
                    store.save(kind, step, state)
        save_best(store, 9, state, 0.5)
        save_best(store, 50, state, 0.25)
    return folder, held


@pytest.fixture
def run(saved_run, tmp_path):
    folder, held = saved_run
    return shutil.copytree(folder, tmp_path / "run", symlinks=True), held


def damage(folder, *, hard=False):
    if hard:
        (folder / "manifest.json").unlink()
    else:
        flip_largest(folder, place=-20)


@pytest.mark.parametrize(
    ("what", "folder"),
    [
        ("latest", "rollback/step-00000100.dcp"),
        (10, "recovery/step-00000010.dcp"),
        ("9", "rollback/step-00000009.dcp"),
        ("best", "best-k/dev_loss-0.25-step-00000050.dcp"),
        ("{run}", "rollback/step-00000100.dcp"),
        ("{run}@50", "recovery/step-00000050.dcp"),
        ("{run}/rollback/step-00000010.dcp", "rollback/step-00000010.dcp"),
    ],
)
def test_a_resume_word_selects_its_checkpoint(run, what, folder):
    place, held = run
    state = new_state(1)
    what = what.format(run=place) if isinstance(what, str) else what
    resumed = load_chosen(place, state, what)
    assert (resumed.saved.folder, resumed.damaged) == (folder, {})
    if resumed.saved.kind != "best-k":
        assert equal(tensors_of(state), held[resumed.saved.step])
        assert state.step == resumed.saved.step
    else:
        assert "parameters only" in resumed.words


def test_best_by_the_direction_of_the_configuration(run):
    found = choose(SavedRun(run[0]), "best", config=PolicyConfig(best_k_direction="maximize"))
    assert found[1] == [
        "best-k/dev_loss-0.5-step-00000009.dcp",
        "best-k/dev_loss-0.25-step-00000050.dcp",
    ]
    with pytest.raises(NothingSaved, match="holds no best-K checkpoint for accuracy"):
        choose(SavedRun(run[0]), "best", config=PolicyConfig(best_k_metric="accuracy"))


@pytest.mark.parametrize("hard", [False, True])
def test_damaged_checkpoints_are_skipped_and_reported(run, hard, caplog):
    place, held = run
    damage(place / "rollback/step-00000100.dcp", hard=hard)
    damage(place / "recovery/step-00000050.dcp")
    # Older than what is loaded, and so not named.
    damage(place / "rollback/step-00000009.dcp", hard=True)
    state = new_state(1)
    resumed = load_chosen(place, state, "latest")
    assert resumed.saved.folder == "recovery/step-00000010.dcp"
    assert equal(tensors_of(state), held[10])
    assert list(resumed.damaged) == ["rollback/step-00000100.dcp", "recovery/step-00000050.dcp"]
    assert "another hash" in resumed.words
    assert ("its save was not finished" in resumed.words) == hard
    assert "skipped a damaged checkpoint" in caplog.text


def test_without_an_intact_checkpoint_each_is_named_and_nothing_changes(run):
    for folder in run[0].glob("r*/step-*"):
        damage(folder)
    state = new_state(1)
    before = tensors_of(state)
    with pytest.raises(
        DamagedCheckpoint, match=r"no requested checkpoint is intact: .*00100.*00050.*00010.*00009"
    ):
        load_chosen(run[0], state, "latest")
    assert equal(before, tensors_of(state))


def test_a_requested_step_is_not_replaced_by_another(run):
    damage(run[0] / "rollback/step-00000100.dcp")
    with pytest.raises(DamagedCheckpoint, match=r"another hash.*saved steps: 9, 10, 50, 100"):
        load_chosen(run[0], new_state(1), 100)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (11, NothingSaved, "holds no step 11; saved steps: 9, 10, 50, 100"),
        ("before-9", NothingSaved, "no state from before step 9; saved steps: 9"),
        (
            "newest",
            ValueError,
            "'newest' is neither a checkpoint nor a run: give latest, best, a step such as 500",
        ),
        (
            "{run}/rollback/step-00000012.dcp",
            NothingSaved,
            "holds no rollback/step-00000012.dcp; saved",
        ),
    ],
)
def test_a_missing_step_is_answered_with_the_existing_ones(run, what, error, message):
    with pytest.raises(error, match=message):
        choose(SavedRun(run[0]), what.format(run=run[0]) if isinstance(what, str) else what)


def test_an_empty_run_and_another_model_are_not_reported_as_damage(run, tmp_path):
    with pytest.raises(NothingSaved, match="start the run anew"):
        load_chosen(tmp_path / "none", new_state(), "latest")
    with pytest.raises(StateMismatch):
        load_chosen(run[0], new_state(build=lambda: torch.nn.Linear(2, 2)), "latest")


def test_a_hostile_checkpoint_is_not_skipped_silently(run, monkeypatch):
    def refuse(*_, **__):
        raise HostileCheckpoint("would run code")

    monkeypatch.setattr(SavedRun, "load", refuse)
    with pytest.raises(HostileCheckpoint):
        load_chosen(run[0], new_state(1), "latest")
