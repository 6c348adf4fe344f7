"""Where nothing can be renamed or linked: the manifest is written last, and `latest` is a file.

python -m pytest tests/test_store_objects.py
"""

import sys

import pytest

from curry_train.runs import BackgroundSaver, DamagedCheckpoint, StepExists, Store
from curry_train.runs.object_files import ObjectFiles
from store_models import equal, new_state, tensors_of, train


@pytest.fixture
def url(request):
    return f"memory://{request.node.name}"


def test_every_kind_is_saved_found_and_loaded(url):
    state = new_state()
    train(state, 2)
    with Store(url) as store:
        rollback, best = store.save("rollback", 2, state), store.save("best-k", 2, state, metric=("dev_loss", 0.5))
        assert rollback.location == f"{url}/rollback/step-00000002.dcp"
        assert store.files.read("latest") == b"rollback/step-00000002.dcp\n"
        for what in ("latest", best, rollback.location):
            store.verify(what)
            other = new_state(seed=1)
            store.load(what, other)
            assert equal(tensors_of(other), tensors_of(state)) or what is best
        with pytest.raises(StepExists):
            store.save("rollback", 2, state)
        store.discard(rollback)
        assert (store.latest(), store.files.pointed("latest")) == (None, None)


def test_what_has_no_manifest_is_swept_and_what_is_damaged_stays(url):
    state = new_state()
    with Store(url) as store:
        store.save("rollback", 1, state)
        store.save("rollback", 2, state)
    files = ObjectFiles(url)
    files.write("rollback/step-00000003.dcp/__0_0.distcp", b"half")
    files.remove_file("rollback/step-00000002.dcp/state.json")
    with Store(url) as store:
        assert files.kind("rollback/step-00000003.dcp") is None
        assert store.latest().step == 1
        with pytest.raises(DamagedCheckpoint, match=r"state.json is missing"):
            store.load("rollback/step-00000002.dcp", state)


def test_saves_in_the_background(url):
    state = new_state()
    with Store(url) as store, BackgroundSaver(store) as saver:
        saver.save("rollback", 1, state)
        expected = tensors_of(state)
        train(state, 2)
        other = new_state(seed=1)
        store.load(saver.finish(), other)
    assert equal(tensors_of(other), expected)


def test_names_with_brackets_are_names_and_not_patterns():
    with Store("memory://run[1]*") as store:
        saved = store.save("rollback", 1, new_state())
        store.discard(saved)
        assert store.files.names("rollback") == []


def test_without_fsspec_the_message_is_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(RuntimeError, match=r"memory://x needs fsspec, which is missing: pip install fsspec"):
        Store("memory://x")
