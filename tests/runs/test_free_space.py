"""Free space is checked on the right volume, for the bytes of all ranks.

python -m pytest tests/runs/test_free_space.py
"""

import shutil
from collections import namedtuple

import pytest
from store_models import new_state, train

from curry_train.runs import Store
from curry_train.runs.files import Files
from curry_train.runs.retention import FREE_SPACE_MARGIN_BYTES, NoRoom, bytes_to_write, require_room

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


def test_too_little_space_is_an_error_with_the_missing_bytes_and_advice(tmp_path, volumes):
    volumes[0][str(tmp_path)] = 60 * 10**9
    files = Files(tmp_path / "not yet")
    for kind, lower in (
        ("rollback", "retention.rollback_keep"),
        ("recovery", "retention.recovery_keep"),
        ("best-k", "best_k"),
    ):
        with pytest.raises(
            NoRoom, match=rf"60.00 GB free.* needs 84.00 GB .*24.00 GB are missing.*lower {lower}"
        ):
            require_room(files, kind, 84 * 10**9)
    assert not (tmp_path / "not yet").exists()


def test_exactly_enough_space_is_accepted(tmp_path, volumes):
    volumes[0][str(tmp_path)] = 1000 + FREE_SPACE_MARGIN_BYTES
    require_room(Files(tmp_path), "rollback", 1000)
    with pytest.raises(NoRoom, match="1 bytes are missing"):
        require_room(Files(tmp_path), "rollback", 1001)


def test_the_predicted_bytes_are_those_that_a_save_writes(tmp_path):
    state = new_state()
    train(state, 1)
    for kind, metric in (("rollback", None), ("best-k", ("loss", 0.5))):
        with Store(tmp_path) as store:
            written = store.save(kind, 1, state, metric=metric).num_bytes
        predicted = bytes_to_write(state.snapshot(), model_only=kind == "best-k")
        assert written <= predicted <= 1.1 * written
