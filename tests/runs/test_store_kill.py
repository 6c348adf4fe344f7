"""An error while a checkpoint is saved leaves the one before whole.

python -m pytest tests/runs/test_store_kill.py
"""

from curry_train.runs import SaveError, Store

from ..store_models import At, CountedFiles, equal, fail, new_state, tensors_of, train

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
