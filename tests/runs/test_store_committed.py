"""Errors after a commit do not undo it, and `latest` is healed whatever stands in its place.

python -m pytest tests/runs/test_store_committed.py
"""

import os
import shutil
from pathlib import Path

import pytest

from curry_train.runs import SavedRun, SaveError, Store

from ..store_models import save_new


def test_every_file_and_folder_is_synced_before_the_rename_and_its_parent_after_it(
    tmp_path, monkeypatch
):
    """A power cut leaves only what was synced."""
    events = []
    fsync, rename = os.fsync, os.rename

    def record_sync(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        events.append((status.st_ino, status.st_size))

    def record_rename(old, new):
        rename(old, new)
        events.append(str(new))

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    with Store(tmp_path) as store:
        folder = tmp_path / save_new(store).folder
    renamed = events.index(str(folder))
    before, after = (
        dict(event for event in part if isinstance(event, tuple))
        for part in (events[:renamed], events[renamed:])
    )
    sizes = {path.stat().st_ino: path.stat().st_size for path in folder.iterdir()}
    assert sizes.items() <= before.items()
    assert folder.stat().st_ino in before
    assert folder.parent.stat().st_ino in after


def test_a_folder_in_place_of_latest_is_warned_of_and_nothing_is_deleted(caplog):
    """A copy that follows links makes one, which may be the only one of its checkpoint."""
    with Store("run") as store:
        save_new(store)
    shutil.copytree("run", "copy", symlinks=False)
    with Store("copy") as store:
        save_new(store, 2)
    assert Path("copy/latest/manifest.json").is_file()
    assert "latest does not point to rollback/step-00000002.dcp" in caplog.text


@pytest.mark.parametrize("limit", ["MOST_STATE_BYTES", "MOST_SMALL_BYTES"])
def test_what_is_too_large_to_be_read_is_not_saved(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(f"curry_train.runs.store.{limit}", 100)
    with (
        Store(tmp_path) as store,
        pytest.raises(SaveError, match=r"takes [\d,]+ bytes, and 100 are the most"),
    ):
        save_new(store)
    assert SavedRun(tmp_path).committed("rollback") == []
