"""A background save is of one moment, reports its errors and leaves nothing behind.

python -m pytest tests/runs/test_store_background.py
"""

import contextlib
import time

import pytest
import torch

from curry_train.runs import BackgroundSaver, SaveError, Store
from curry_train.runs.background import Staging
from curry_train.runs.format import ShardedSave

from ..command_runs import in_python
from ..store_models import At, CountedFiles, equal, fail, new_state, save_new, tensors_of, train


def restored(store, saved):
    """Return the tensors of a new state that has loaded a checkpoint."""
    other = new_state(seed=1)
    store.load(saved, other)
    return tensors_of(other)


def test_training_continues_while_a_save_is_written(tmp_path):
    """Write to a slow disk, where later steps would tear a save that reads live tensors."""
    state = new_state()
    train(state, 2)
    slow = CountedFiles(lambda operation: time.sleep(0.02))
    with slow, Store(tmp_path) as store, BackgroundSaver(store) as saver:
        expected = tensors_of(state)
        saver.save("rollback", 2, state)
        running = saver._running
        trained = 0
        while not running.done():
            train(state, 1)
            trained += 1
        saved = saver.finish()
        assert trained >= 3
        assert equal(restored(store, saved), expected)


def test_consecutive_saves_each_hold_the_state_of_their_call(store):
    """Reuse buffers, for which the second save has to wait."""
    state = new_state()
    expected = {}
    with BackgroundSaver(store) as saver:
        for step in range(1, 6):
            train(state, 1)
            expected[step] = tensors_of(state)
            saver.save("rollback", step, state)
    for saved in store.committed("rollback"):
        assert equal(restored(store, saved), expected.pop(saved.step))
    assert not expected


def test_the_optimizer_waits_for_the_copies_by_itself(store, monkeypatch):
    """Without the wait, a step during the copy would get into the checkpoint."""
    state = new_state()
    train(state, 1)
    copy = Staging._copy_all

    def slow(self, sources):
        time.sleep(0.3)
        copy(self, sources)

    monkeypatch.setattr(Staging, "_copy_all", slow)
    expected = tensors_of(state)
    with BackgroundSaver(store) as saver:
        saver.save("rollback", 1, state)
        train(state, 1)
        saved = saver.finish()
    assert equal(restored(store, saved), expected)


def test_a_state_without_optimizers_is_copied_before_save_returns(store):
    state = new_state()
    state.optimizers = []
    with BackgroundSaver(store) as saver:
        expected = tensors_of(state)
        saver.save("rollback", 1, state)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.zero_()
        saved = saver.finish()
    other = new_state(seed=1)
    other.optimizers = []
    store.load(saved, other)
    assert equal(tensors_of(other), expected)


@contextlib.contextmanager
def failing(tmp_path):
    with CountedFiles() as files, Store(tmp_path) as store:
        files.ask = At(6, fail(OSError(28, "No space left on device")))
        yield files, store


def test_an_error_of_a_save_is_raised_at_the_next_step(tmp_path):
    state = new_state()
    with failing(tmp_path) as (files, store), BackgroundSaver(store) as saver:
        saver.save("rollback", 1, state)
        assert saver._running.exception()
        with pytest.raises(SaveError, match=r"step-00000001.dcp .* was not saved: .*No space left"):
            train(state, 1)
        train(state, 1)  # the error is reported once
        files.ask = lambda operation: None
        saver.save("rollback", 2, state)
        assert saver.finish().step == 2


@pytest.mark.parametrize("call", ["finish", "save"])
def test_an_error_of_a_save_is_raised_at_the_next_call(tmp_path, call):
    state = new_state()
    with failing(tmp_path) as (_, store), BackgroundSaver(store) as saver:
        saver.save("rollback", 1, state)
        arguments = ("rollback", 2, state) if call == "save" else ()
        with pytest.raises(SaveError, match="No space left"):
            getattr(saver, call)(*arguments)


@pytest.mark.parametrize(
    ("moment", "error", "message"),
    [
        ("__init__", KeyError, "odd"),
        ("write", SaveError, r"step-00000001.dcp .* was not saved: .*odd"),
    ],
)
def test_any_error_of_a_save_leaves_no_folder(store, monkeypatch, moment, error, message):
    monkeypatch.setattr(ShardedSave, moment, lambda *_, **__: fail(KeyError("odd"))())
    with pytest.raises(error, match=message):
        save_new(store)
    assert not [*(store.root / "rollback").iterdir()]


AT_EXIT = """
import time
from curry_train.runs import BackgroundSaver, Store
from tests.store_models import CountedFiles, new_state
CountedFiles(lambda operation: time.sleep(0.005))
store = Store(".")
saver = BackgroundSaver(store)
saver.save("rollback", 1, new_state())
"""


def test_a_process_finishes_its_save_before_it_ends(tmp_path):
    done = in_python("-c", AT_EXIT, cwd=tmp_path)
    assert (done.stderr, len(Store(tmp_path).committed("rollback"))) == ("", 1)


COPIED = {
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "boolean": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 5).t(),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "part": torch.arange(10)[3:7],
}


def test_copies_of_any_layout_are_equal():
    staging = Staging()
    for _ in range(2):  # in new buffers, and in the same ones again
        staging.begin(list(COPIED.values()))()
        for (name, source), copy in zip(COPIED.items(), staging.buffers, strict=True):
            assert torch.equal(copy.cfloat(), source.cfloat()), name
            assert copy.data_ptr() != source.data_ptr() or not source.numel()
