"""Free space is checked on the right volume, for the bytes of all ranks.

python -m pytest tests/runs/test_free_space.py
"""

import shutil
from collections import namedtuple

import pytest
from store_models import new_state, train

from curry_train.runs import Store
from curry_train.runs.files import Files
from curry_train.runs.retention import NoRoom, bytes_to_write, require_room

USAGE = namedtuple("Usage", "total used free")


@pytest.fixture
def volumes(monkeypatch):
    """Fake the free space of volumes by path prefix, and record the paths that were looked up."""
    free, asked = {}, []

    def usage(path):
        asked.append(str(path))
        return USAGE(
            0, 0, next(left for begin, left in free.items() if str(path).startswith(begin))
        )

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return free, asked


def test_free_space_is_that_of_the_volume_behind_a_link(tmp_path, volumes):
    free, asked = volumes
    large, run = tmp_path / "large", tmp_path / "run"
    large.mkdir()
    run.mkdir()
    (run / "recovery").symlink_to(large)
    free.update({str(large): 10**12, str(run): 0})
    require_room(Files(run), "recovery", 10**11)
    assert asked == [str(large)]
    with pytest.raises(NoRoom):
        require_room(Files(run), "rollback", 10)


def test_the_predicted_bytes_are_those_that_a_save_writes(tmp_path):
    state = new_state()
    train(state, 1)
    for kind, metric in (("rollback", None), ("best-k", ("loss", 0.5))):
        with Store(tmp_path) as store:
            written = store.save(kind, 1, state, metric=metric).num_bytes
        predicted = bytes_to_write(state.snapshot(), model_only=kind == "best-k")
        assert written <= predicted <= 1.1 * written
