"""Without renames or links the manifest is written last, and `latest` is a file.

python -m pytest tests/runs/test_store_objects.py
"""

import sys

import pytest
import strict_objects
from store_models import At, CountedObjects, equal, fail, new_state, tensors_of, train

from curry_train.runs import BackgroundSaver, DamagedCheckpoint, SaveError, StepExists, Store
from curry_train.runs.files import ObjectFiles
from curry_train.runs.policy import SavingPolicy
from curry_train.runs.policy_config import PolicyConfig, Retention
from curry_train.runs.resume import load_chosen
from curry_train.runs.spike import Recoveries, Recovery


@pytest.fixture(params=["memory", "strict"])
def url(request):
    """Return the URL of a lenient store, and of one as strict as real object stores."""
    return f"{request.param}://{request.node.originalname}"


def test_every_kind_is_saved_found_and_loaded(url):
    state = new_state()
    train(state, 2)
    with Store(url) as store:
        rollback, best = (
            store.save("rollback", 2, state),
            store.save("best-k", 2, state, metric=("dev_loss", 0.5)),
        )
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


def test_folders_without_a_manifest_are_swept_and_damaged_checkpoints_stay(url):
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


def test_recoveries_are_listed_anew_on_an_object_store(url):
    files = ObjectFiles(url)
    done = [
        Recovery(spike=20 + start, back_to=16, start=start, stop=start + 2, attempt=1)
        for start in (1, 7)
    ]
    recoveries = Recoveries(files)
    for one in done:
        recoveries.add(one, write=True)
    assert Recoveries(files).done == done


def test_background_saves_to_an_object_store(url):
    state = new_state()
    with Store(url) as store, BackgroundSaver(store) as saver:
        saver.save("rollback", 1, state)
        expected = tensors_of(state)
        train(state, 2)
        other = new_state(seed=1)
        store.load(saver.finish(), other)
    assert equal(tensors_of(other), expected)


def test_a_policy_keeps_turns_back_and_resumes(url):
    config = PolicyConfig(rollback_every=2, recovery_every=6, best_k=1, retention=Retention(2, 1))
    state = new_state()
    with Store(url) as store, SavingPolicy(store, config) as policy:
        while state.step < 10:
            train(state, 1)
            policy.after_step(state.step, state, {"loss": 1.0, "dev_loss": 1.0 / state.step})
        assert [one.step for one in store.committed("rollback")] == [8, 10]
        assert [one.step for one in store.committed("best-k")] == [10]
        policy.turn_back(8)
    with Store(url) as store:  # another client, which sees the objects of the first
        other = new_state(1)
        assert SavingPolicy(store, config).resume(other).saved.step == other.step == 8
        assert [one.step for one in store.committed("recovery")] == [6]


@pytest.mark.parametrize("number", range(1, 16, 2))
def test_an_error_at_any_change_leaves_committed_checkpoints(url, number):
    """After an error of the store, whole checkpoints stay whole and the next save succeeds."""
    state, at = new_state(), At(None, fail(OSError(503, "Slow Down")))
    with Store(url, files=CountedObjects(url, ask=at)) as store:
        if store.committed("rollback"):  # the other error numbers are tested above
            for one in store.committed("rollback"):
                store.discard(one)
        store.save("rollback", 1, state)
        before = tensors_of(state)
        at.count = 0
        at.number = number
        train(state, 1)
        message = None
        try:
            store.save("rollback", 2, state)
        except SaveError as error:
            message = str(error)
        assert (
            message is None
            or "the newest intact checkpoint is step 1 (rollback)" in message
            or at.last == "point"
        )
        at.number = None
    other = new_state(1)
    step = load_chosen(url, other, "latest").saved.step
    assert step == 2 or equal(tensors_of(other), before)
    with Store(url) as store:
        store.verify("latest")
        store.save("rollback", 3, state)


def test_a_strict_store_is_strict():
    """Check that the strict store refuses what object stores refuse."""
    files = strict_objects.StrictObjects()
    with files.open("strict://twin/a.dcp/part", "wb") as stream:
        stream.write(b"half")
        assert not files.exists("twin/a.dcp/part")
    assert files.ls("twin/a.dcp", detail=False) == ["twin/a.dcp/part"]
    strict_objects.StrictObjects().pipe_file("twin/a.dcp/other", b"")
    assert files.ls("twin/a.dcp", detail=False) == ["twin/a.dcp/part"]  # until it clears its cache
    with pytest.raises(AssertionError, match="written twice"):
        files.open("twin/a.dcp/part", "wb")
    for refused in (lambda: files.mv("twin/a.dcp/part", "b"), lambda: files.open("twin/x", "ab")):
        with pytest.raises(NotImplementedError):
            refused()


def test_names_with_brackets_are_names_and_not_patterns():
    with Store("memory://run[1]*") as store:
        saved = store.save("rollback", 1, new_state())
        store.discard(saved)
        assert store.files.names("rollback") == []


def test_without_fsspec_the_message_has_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        RuntimeError, match=r"memory://x needs fsspec, which is missing: pip install fsspec"
    ):
        Store("memory://x")
