"""The lock of a run on a file system that other hosts write to.

python -m pytest tests/runs/test_lock_hosts.py
"""

import time
from pathlib import Path

import pytest
from store_models import new_state

from curry_train.runs import BackgroundSaver, LockedRun, SavedRun, SaveError, Store, lock
from curry_train.runs.lock import kernel_locks_reach_all


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """Let other hosts write to every folder, and leases end soon."""
    monkeypatch.setattr(lock, "kernel_locks_reach_all", lambda path: False)
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.02)


def fall_silent(store, monkeypatch):
    """Stop the renewals, as the death of the process or of its host does."""
    store._lock._lock._stop_heartbeat()
    monkeypatch.setattr("socket.gethostname", lambda: "another")


def test_a_live_writer_is_refused_and_a_silent_one_taken_over(tmp_path, monkeypatch):
    first = Store(tmp_path)
    writing = first.begin("rollback", 1, new_state())
    with pytest.raises(LockedRun, match=r"held by process .* on .* since .*: end it"):
        Store(tmp_path).open()
    first.commit(writing, [writing.write()])

    late = first.begin("rollback", 2, new_state())
    part = late.write()
    fall_silent(first, monkeypatch)
    began = time.monotonic()
    with Store(tmp_path) as second:
        assert time.monotonic() - began > 0.5
        assert [saved.step for saved in second.committed("rollback")] == [1]
        second.save("rollback", 3, new_state())

        # The first process was only asleep, and wakes up. It can't commit, delete or unlock.
        with pytest.raises(LockedRun, match=r"taken over by process .* on another"):
            first.commit(late, [part])
        with pytest.raises(LockedRun, match=r"taken over by process .* on another"):
            first.discard("rollback/step-00000001.dcp")
        with pytest.raises(SaveError, match="taken over"):
            first.save("rollback", 4, new_state())
        first.close()
        with pytest.raises(LockedRun, match="on another"):
            Store(tmp_path).open()
        second.save("rollback", 5, new_state())
    assert [saved.step for saved in SavedRun(tmp_path).committed("rollback")] == [1, 3, 5]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("writer")] == []


def test_a_save_that_began_before_a_takeover_fails_though_the_lock_looked_held(
    tmp_path, monkeypatch
):
    """Take over between the look at the lock and the rename: the folder is gone by then."""
    first = Store(tmp_path)
    writing = first.begin("rollback", 1, new_state())
    part = writing.write()
    fall_silent(first, monkeypatch)
    with Store(tmp_path):
        monkeypatch.setattr(first._lock, "require_held", lambda: None)
        with pytest.raises(FileNotFoundError):
            first.commit(writing, [part])
        assert SavedRun(tmp_path).committed("rollback") == []
    first.close()


def test_a_background_save_reports_that_the_lock_was_taken_over(tmp_path, monkeypatch):
    state = new_state()
    with Store(tmp_path) as first, BackgroundSaver(first) as saver:
        fall_silent(first, monkeypatch)
        with Store(tmp_path):
            saver.save("rollback", 1, state)
            with pytest.raises(SaveError, match=r"taken over by process .* on another"):
                saver.finish()


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:40 / /nfs4 rw - nfs4 host:/x rw,vers=4.2,hard,local_lock=none,addr=1
25 22 0:42 / /with\\040space rw shared:1 - xfs x rw
26 22 0:43 / /lustre rw - lustre x rw,localflock
28 22 0:45 / /nfs4/disk rw - xfs /dev/vdb rw
29 28 0:46 / /over rw - ext4 x rw
30 28 0:47 / /over rw - fuse x rw
"""
REACHING = {
    "/runs/a": True,
    "/nfs4/a": False,
    "/nfs4a": True,
    "/with space/a": True,
    "/lustre/a": False,
    "/nfs4/disk/a": True,
    "/over/a": False,
}


def test_kernel_locks_are_trusted_on_disks_of_this_machine(tmp_path, monkeypatch):
    table = tmp_path / "mounts"
    table.write_text(MOUNTS)
    monkeypatch.setattr(lock, "MOUNTS_FILE", table)
    assert {path: kernel_locks_reach_all(Path(path)) for path in REACHING} == REACHING
    monkeypatch.setattr(lock, "MOUNTS_FILE", tmp_path / "missing")
    assert not kernel_locks_reach_all(Path("/runs/a"))
