"""A reader holds what it reads, and releases it however it ends.

python -m pytest tests/runs/test_reading.py
"""

import subprocess
import sys

import pytest
from store_models import equal, new_state, tensors_of, train
from tree import ROOT

from curry_train.runs import SavedRun, Store
from curry_train.runs.files import Files
from curry_train.runs.lock import is_being_read
from curry_train.runs.policy import SavingPolicy
from curry_train.runs.policy_config import PolicyConfig, Retention

FOLDER = "rollback/step-00000001.dcp"
HOLD = """
import sys
from curry_train.runs.files import Files
from curry_train.runs.lock import reading
with reading(Files(sys.argv[1]), sys.argv[2]) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def saved(folder):
    with Store(folder) as store:
        store.save("rollback", 1, new_state())
    return Files(folder)


def test_a_reader_in_another_process_holds_it_until_it_is_killed(tmp_path):
    files = saved(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path), FOLDER]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT / "template")},
    )
    with process:
        assert process.stdout.readline() == "True\n"
        assert is_being_read(files, FOLDER)
        process.kill()
    assert not is_being_read(files, FOLDER)


class FilesInUse(Files):
    """File access that calls `then` once, after a number of checkpoint files were opened."""

    def __init__(self, root, *, after, then):
        super().__init__(root)
        self._left, self._then = after, then

    def open(self, key):
        if ".dcp/" in key:
            self._left -= 1
            if self._left == 0:
                self._then()
        return super().open(key)


@pytest.mark.parametrize("after", [2, 4, 6])
@pytest.mark.parametrize("how", ["load", "verify", "best"])
def test_retention_leaves_what_a_caller_of_load_or_verify_reads(tmp_path, how, after):
    """Let another process train on, which would delete the checkpoint while it is read."""
    state, other = new_state(), new_state(1)
    config = PolicyConfig(
        rollback_every=1, recovery_every=None, best_k=1, retention=Retention(1, 1)
    )
    deleted = []
    with Store(tmp_path) as store, SavingPolicy(store, config) as policy:

        def go_on(dev_loss):
            train(state, 1)
            before = {
                one.folder for kind in ("rollback", "best-k") for one in store.committed(kind)
            }
            policy.after_step(state.step, state, {"dev_loss": dev_loss})
            after = {one.folder for kind in ("rollback", "best-k") for one in store.committed(kind)}
            deleted.append(sorted(before - after))

        go_on(0.5)
        held = tensors_of(state)
        reader = SavedRun(
            tmp_path, files=FilesInUse(tmp_path, after=after, then=lambda: go_on(0.4))
        )
        saved = store.committed("best-k" if how == "best" else "rollback")[0]
        reader.verify(saved) if how == "verify" else reader.load(saved, other)
        if how == "load":
            assert equal(tensors_of(other), held)
        opened = len(deleted) == 2  # a checkpoint with fewer files is read completely before
        assert not opened or saved.folder not in deleted[1]
        go_on(0.3)
        assert saved.folder in deleted[-1]  # the next save deletes it
        assert opened or after == 6
