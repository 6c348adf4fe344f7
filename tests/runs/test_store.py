"""Checkpoints commit whole or not at all, are found by number, and are read by torch's own tools.

python -m pytest tests/runs/test_store.py
"""

import math
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from curry_train.runs import DamagedCheckpoint, SaveError, StepExists, Store, load_chosen
from curry_train.runs.format import NOT_IN_SAFETENSORS
from curry_train.runs.values import PLAIN_DTYPES

from ..store_models import (
    At,
    CountedFiles,
    equal,
    fail,
    new_state,
    save_best,
    save_new,
    tensors_of,
    train,
)


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
    for root in ("s3://bucket/run", ""):
        with pytest.raises(ValueError, match=rf"{root} is no folder: .* fsspec"):
            Store(root)
    assert list(tmp_path.iterdir()) == []


# Errors.


ERRORS = [
    OSError(28, "No space left on device"),
    OSError(5, "Input/output error"),
    OSError(30, "Read-only file system"),
]


def test_an_error_at_any_change_is_a_save_error_and_the_previous_checkpoint_stays(tmp_path):
    """Name the cause in the error, and save again with the same store once there is space."""
    state = new_state()
    with CountedFiles() as files, Store(tmp_path) as store:
        first = store.save("rollback", 1, state)
        expected = tensors_of(state)
        train(state, 1)
        failures = number = 0
        step = 2
        messages = []
        while True:
            number += 1
            files.ask = At(number, fail(ERRORS[number % 3]))
            try:
                store.save("rollback", step, state)
            except SaveError as error:
                failures += 1
                messages.append((str(error), ERRORS[number % 3].strerror, f"step-{step:08d}"))
            else:
                break
            finally:
                files.ask = lambda operation: None
            # The error came after the commit.
            if any(saved.step == step for saved in store.committed("rollback")):
                store.verify(store.latest())
                step += 1
            store.verify(first)
        assert failures >= 10
        other = new_state(seed=3)
        store.load(first, other)
        assert equal(tensors_of(other), expected)
        assert [row for row in messages if row[1] not in row[0] or row[2] not in row[0]] == []
        store.verify(store.save("rollback", step + 1, state))
        assert store.scan("rollback")[1] == {}


# Best-K.


def test_the_safetensors_package_reads_every_dtype(store, tmp_path):
    dtypes = sorted(PLAIN_DTYPES - NOT_IN_SAFETENSORS, key=str)
    both = torch.randn(6)
    tensors = {
        **{f"t_{number}": torch.ones(2, 3).to(dtype) for number, dtype in enumerate(dtypes)},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 3).t(),
        "overlapping": both[:4],
        "with it": both[2:],
    }
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    state = new_state(build=lambda: nn.Sequential(nn.Linear(1, 1), module))
    path = tmp_path / save_best(store, 1, state).folder / "model.safetensors"
    found = load_file(path)
    assert found.keys() == {"0.weight", "0.bias", *(f"1.{name}" for name in tensors)}
    for name, tensor in tensors.items():
        assert found[f"1.{name}"].dtype == tensor.dtype
        assert torch.equal(
            found[f"1.{name}"].view(-1).view(torch.uint8),
            tensor.contiguous().view(-1).view(torch.uint8),
        )
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
