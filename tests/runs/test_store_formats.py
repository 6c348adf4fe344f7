"""Checkpoints of format 1 load, and newer formats than ours are refused.

python -m pytest tests/runs/test_store_formats.py
"""

import shutil
from collections import deque
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from format_1_model import new_format_1_state
from store_models import equal, tensors_of
from torch.distributed.checkpoint import FileSystemReader

from curry_train.runs import DamagedCheckpoint, SavedRun, Store
from curry_train.runs.format import INDEX_FILE_NAME
from curry_train.runs.layout import MANIFEST_FORMAT, parse_manifest, read_manifest

FORMAT_1 = Path(__file__).parent / "format_1"


def read_by_torch(folder):
    """Return all tensors of a checkpoint as torch's own reader gives them."""
    metadata = FileSystemReader(folder).read_metadata()
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in metadata.state_dict_metadata.items()
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_format_1_loads_as_the_same_state(tmp_path):
    state = new_format_1_state(seed=1)
    run = SavedRun(FORMAT_1)
    assert read_manifest(run.files, run.latest().folder).format == 1
    report = run.load(run.latest(), state)
    assert report.exact
    assert (state.step, state.position) == (3, 12)
    # Format 1 joined the names of parts and groups otherwise.
    found = {
        name.replace("/", ".").replace("#", ""): tensor
        for name, tensor in tensors_of(state).items()
    }
    assert equal(found, read_by_torch(FORMAT_1 / run.latest().folder))

    odd = state.parts["extra-odd"].kept
    assert (odd["recent"], odd["nested"][3]) == (deque([1, 2]), (None, float("inf")))
    assert odd["nested"]["again"][0].equal(torch.ones(2))
    assert (odd["array"] == numpy.arange(4)).all()
    assert state.parts["extra-data"].epoch == 2
    assert state.model[0].scale == (1, 2.5)

    with Store(tmp_path) as store:
        saved = store.save("rollback", 3, state)
        again = new_format_1_state(seed=2)
        store.load(saved, again)
    assert equal(tensors_of(again), tensors_of(state))


def test_a_best_of_format_1_loads():
    state = new_format_1_state(seed=1)
    run = SavedRun(FORMAT_1)
    (best,) = run.committed("best-k")
    report = run.load(best, state)
    assert report.exact
    assert state.model[0].scale == (1, 2.5)


def test_what_is_saved_today_has_the_newest_format_and_its_own_index(tmp_path):
    with Store(tmp_path) as store:
        saved = store.save("rollback", 1, new_format_1_state())
        manifest = read_manifest(store.files, saved.folder)
    assert manifest.format == MANIFEST_FORMAT == 2
    assert INDEX_FILE_NAME in manifest.files


def test_a_format_of_the_future_is_refused_with_the_remedy(tmp_path):
    shutil.copytree(FORMAT_1, tmp_path / "run")
    run = SavedRun(tmp_path / "run")
    data = run.files.read(f"{run.latest().folder}/manifest.json")
    with pytest.raises(DamagedCheckpoint, match=r"format 9.*use the version that wrote it"):
        parse_manifest(data.replace(b'"format": 1', b'"format": 9'))
