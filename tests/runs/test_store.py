"""Checkpoints commit whole, are found by number, and are read by torch's own tools.

python -m pytest tests/runs/test_store.py
"""

import math
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from curry_train.runs import DamagedCheckpoint, StepExists, Store, load_chosen

from ..store_models import equal, new_state, save_best, save_new, tensors_of, train


@pytest.mark.parametrize(
    "arguments",
    [
        ("weekly", 1, None),
        ("rollback", -1, None),
        ("rollback", 1.0, None),
        ("best-k", 1, None),
        ("rollback", 1, ("loss", 1.0)),
        ("best-k", 1, ("dev/loss", 1.0)),
        ("best-k", 1, ("loss", math.nan)),
    ],
)
def test_invalid_kinds_steps_and_metrics_are_refused(store, arguments):
    kind, step, metric = arguments
    with pytest.raises(ValueError, match="a step is a whole number from 0"):
        store.save(kind, step, new_state(), metric=metric)


def test_a_valid_checkpoint_is_never_written_into(store):
    saved = save_new(store)
    assert {*store.committed()} == {saved}
    before = store.verify(saved)
    with pytest.raises(StepExists, match="discard it first"):
        save_new(store, seed=1)
    assert store.verify(saved) == before
    store.discard(saved)
    assert store.committed("rollback") == []
    save_new(store, seed=1)


def test_a_damaged_checkpoint_in_the_way_is_replaced(store, tmp_path):
    state = new_state()
    saved = store.save("rollback", 1, state)
    (tmp_path / saved.folder / "state.pt").unlink()
    assert store.committed("rollback") == []
    assert "state.pt is missing" in store.scan("rollback")[1][saved.folder]
    store.verify(store.save("rollback", 1, state))


def test_latest_follows_what_is_saved_and_discarded(store, tmp_path):
    state = new_state()
    first, second = store.save("rollback", 1, state), store.save("recovery", 2, state)
    save_best(store, 3, state)
    assert str((tmp_path / "latest").readlink()) == second.folder  # a best-k can't be resumed from
    store.discard(second)
    assert str((tmp_path / "latest").readlink()) == first.folder
    store.discard(first)
    assert not (tmp_path / "latest").is_symlink()
    with pytest.raises(DamagedCheckpoint, match="nothing to resume from"):
        load_chosen(store, state)


def test_torchs_own_load_reads_a_checkpoint(store):
    state = new_state()
    train(state, 2)
    saved = store.save("recovery", 2, state)
    expected = tensors_of(state)
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about running without ranks
        dcp.load(
            found,
            checkpoint_id=saved.location,
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
        )
    assert equal(found, expected)


@pytest.mark.parametrize("path", ["../other/rollback/step-00000001.dcp", "/etc/passwd", "best-k/x"])
def test_only_checkpoints_of_this_run_are_loaded(store, path):
    with pytest.raises(DamagedCheckpoint, match=r"is not the folder of a checkpoint"):
        store.load(path, new_state())


def test_a_url_is_refused_and_makes_no_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"s3://bucket/run is no folder: .* fsspec"):
        Store("s3://bucket/run")
    assert list(tmp_path.iterdir()) == []
