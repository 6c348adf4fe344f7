"""A process that dies while it saves leaves the newest committed checkpoint whole.

python -m pytest tests/runs/test_store_kill.py
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from store_models import At, CountedFiles, equal, fail, new_state, tensors_of, train
from tree import ROOT
from warm_python import warm_python

from curry_train.runs import SaveError, Store

QUICK = "/dev/shm" if Path("/dev/shm").is_dir() and os.access("/dev/shm", os.W_OK) else None


def test_no_kill_loses_or_mixes_committed_checkpoints():
    """Kill at every seventh change of the disk; the recorded run kills at every one."""
    with tempfile.TemporaryDirectory(dir=QUICK) as folder:
        command = [warm_python(), "-m", "store_kills", folder, "--every", "7", "--random", "4"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / folder) for folder in ("template", "benchmarks", "tests/runs")]
            )
        }
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kinds = ("at_each_change", "at_random")
    assert [found[kind]["wrong"] for kind in kinds] == [[], []]
    assert found["at_each_change"]["kills"] >= 9


ERRORS = [
    OSError(28, "No space left on device"),
    OSError(5, "Input/output error"),
    OSError(30, "Read-only file system"),
]


def test_an_error_at_any_change_is_a_save_error_and_the_previous_checkpoint_stays(tmp_path):
    """Name the cause in the error, and save again with the same store once there is space."""
    state = new_state()
    files = CountedFiles(tmp_path)
    with Store(tmp_path, files=files) as store:
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
            other = new_state(seed=3)
            store.load(first, other)
            assert equal(tensors_of(other), expected)
        assert failures >= 10
        assert [row for row in messages if row[1] not in row[0] or row[2] not in row[0]] == []
        store.verify(store.save("rollback", step + 1, state))
        assert store.damaged("rollback") == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder")
def test_a_folder_that_can_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SaveError, match="Permission denied"):
        Store(tmp_path).save("rollback", 1, new_state())
    tmp_path.chmod(0o700)
