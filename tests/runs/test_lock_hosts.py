"""The lock of a run on other hosts, without kernel locks, and with a damaged lock file.

Hosts are simulated: the name of the host and of the machine are patched, so that a process sees
its own claim as that of another host.

python -m pytest tests/runs/test_lock_hosts.py
"""

import errno
import fcntl
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest
from store_models import new_state

from curry_train.runs import BackgroundSaver, LockedRun, SavedRun, SaveError, Store, heartbeat, lock
from curry_train.runs.files import Files
from curry_train.runs.lock import RunLock, kernel_locks_reach_all

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@pytest.fixture
def on(monkeypatch):
    """Let this process be on the host that is named in a call, from there on."""

    def go_to(host):
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        monkeypatch.setattr(lock, "_machine", lambda: f"machine of {host}")

    return go_to


@pytest.fixture
def no_locks(monkeypatch):
    """Take kernel locks away, as on NFS without lockd; the test may choose the error."""

    def take_away(number=errno.ENOLCK):
        def refuse(descriptor, operation):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)

    return take_away


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.03)
    monkeypatch.setattr(lock, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def local_locks(monkeypatch):
    """Let kernel locks reach the processes of one host only, and open files of both hosts here."""
    monkeypatch.setattr(lock, "kernel_locks_reach_all", lambda path: False)
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)


def die(store):
    """Stop a store as the death of its process does: its lock is not released."""
    store._lock._heartbeat._ended.set()
    store._lock._heartbeat._thread.join()


def claim(**facts):
    return json.dumps({"pid": 1, "host": "elsewhere", "since": "2026-01-01", **facts})


def test_a_lock_of_another_host_is_taken_over_where_the_kernel_shows_that_it_is_free(
    tmp_path, caplog
):
    """Restart a pod under another name, on the disk of the one that was preempted."""
    (tmp_path / "writer.lock").write_text(claim(started="1"))
    before = threading.active_count()
    with Store(tmp_path) as store:
        store.save("rollback", 1, new_state())
        assert threading.active_count() == before  # a kernel lock needs no heartbeat
    assert "taking over the lock of process 1 on elsewhere" in caplog.text


def test_a_lock_of_another_host_that_shows_no_life_has_to_be_deleted_by_hand(tmp_path, local_locks):
    """Meet a claim that relies on a kernel lock which does not reach this host."""
    (tmp_path / "writer.lock").write_text(claim(started="1"))
    with pytest.raises(
        LockedRun, match=r"process 1 on elsewhere .* can't be seen from here: if it is dead, delete"
    ):
        Store(tmp_path).open()


@pytest.mark.parametrize("number", [*NO_LOCKS, None])
def test_a_writer_that_lives_on_another_host_is_refused_and_a_silent_one_taken_over(
    tmp_path, on, quick, no_locks, local_locks, number
):
    """Cover file systems without kernel locks (`number`), and with locks of one host only."""
    if number is not None:
        no_locks(number)
    on("first")
    first = Store(tmp_path)
    writing = first.begin("rollback", 1, new_state())
    on("second")
    with pytest.raises(LockedRun, match=r"process .* on first since .* shows signs of life"):
        Store(tmp_path).open()
    on("first")
    first.commit(writing, [writing.write()])  # it still holds the lock

    late = first.begin("rollback", 2, new_state())
    part = late.write()
    die(first)
    on("second")
    began = time.monotonic()
    with Store(tmp_path) as second:
        assert time.monotonic() - began > 0.25
        assert [saved.step for saved in second.committed("rollback")] == [1]
        second.save("rollback", 3, new_state())

        # The first process was only asleep, and wakes up. It can't commit, delete or unlock.
        on("first")
        with pytest.raises(LockedRun, match=r"taken over by process .* on second"):
            first.commit(late, [part])
        with pytest.raises(LockedRun, match=r"taken over by process .* on second"):
            first.discard("rollback/step-00000001.dcp")
        with pytest.raises(SaveError, match="taken over"):
            first.save("rollback", 4, new_state())
        first.close()
        with pytest.raises(LockedRun, match="on second"):
            Store(tmp_path).open()
        on("second")
        second.save("rollback", 5, new_state())
    assert [saved.step for saved in SavedRun(tmp_path).committed("rollback")] == [1, 3, 5]
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("writer")} <= {
        "writer.lock"
    }


def test_a_save_that_began_before_a_takeover_fails_though_the_lock_looked_held(
    tmp_path, on, quick, no_locks, monkeypatch
):
    """Take over between the look at the lock and the rename: the folder is gone by then."""
    no_locks()
    on("first")
    first = Store(tmp_path)
    writing = first.begin("rollback", 1, new_state())
    part = writing.write()
    die(first)
    on("second")
    with Store(tmp_path):
        monkeypatch.setattr(first._lock, "require_held", lambda: None)
        with pytest.raises(FileNotFoundError):
            first.commit(writing, [part])
        assert SavedRun(tmp_path).committed("rollback") == []


def test_a_background_save_reports_that_the_lock_was_taken_over(tmp_path, on, quick, no_locks):
    no_locks()
    on("first")
    state = new_state()
    with Store(tmp_path) as first, BackgroundSaver(first) as saver:
        die(first)
        on("second")
        with Store(tmp_path):
            on("first")
            saver.save("rollback", 1, state)
            with pytest.raises(SaveError, match=r"taken over by process .* on second"):
                saver.finish()


def test_of_processes_that_start_together_at_most_one_gets_the_lock(
    tmp_path, quick, no_locks, monkeypatch
):
    """Run two claims in 150 random orders of their accesses to the files, and eight threads."""
    no_locks()
    order = random.Random(3)
    turns = threading.Condition()
    waiting = set()
    holders = []

    class Scheduled(Files):
        """Files whose accesses wait for their turn."""

        def wait(self):
            me = threading.get_ident()
            with turns:
                waiting.add(me)
                turns.notify_all()
                turns.wait_for(lambda: me not in waiting)

        def names(self, key):
            self.wait()
            return super().names(key)

        def put(self, key, data):
            self.wait()
            super().put(key, data)

        def remove_file(self, key):
            self.wait()
            super().remove_file(key)

        def kind(self, key):
            self.wait()
            return super().kind(key)

    monkeypatch.setattr(lock.Heartbeat, "start", lambda self: None)
    monkeypatch.setattr(lock.Heartbeat, "stop", lambda self: None)

    def claim_it(files):
        try:
            run_lock = RunLock(files)
            run_lock.acquire()
            holders.append(run_lock)
        except LockedRun:
            pass

    outcomes = set()
    for number in range(150):
        folder = tmp_path / str(number)
        folder.mkdir()
        holders.clear()
        threads = [threading.Thread(target=claim_it, args=(Scheduled(folder),)) for _ in range(2)]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            with turns:
                running = sum(each.is_alive() for each in threads)
                turns.wait_for(lambda: len(waiting) >= running, timeout=0.002)  # noqa: B023
                if waiting:
                    waiting.discard(order.choice(sorted(waiting)))
                    turns.notify_all()
        outcomes.add(len(holders))
    assert outcomes <= {0, 1}
    assert 1 in outcomes

    holders.clear()
    (tmp_path / "many").mkdir()
    threads = [
        threading.Thread(target=claim_it, args=(Files(tmp_path / "many"),)) for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(holders) <= 1


def test_the_announcement_of_a_process_that_died_in_between_is_removed(tmp_path, quick, no_locks):
    no_locks()
    dead = {**lock.this_process(), "pid": 2**22 + 1}
    (tmp_path / f"writer.lock.{'a' * 32}").write_text(json.dumps(dead))
    (tmp_path / f"writer.lock.{'b' * 32}").write_text(claim(beats=True))  # of another host
    with Store(tmp_path) as store:
        assert [name for name in store.files.names("") if name.startswith("writer.lock.")] == []


def test_the_announcement_of_another_host_stays_until_that_is_silent(tmp_path, quick, no_locks):
    no_locks()
    other = tmp_path / f"writer.lock.{'b' * 32}"
    other.write_text(claim(beats=True))
    own = RunLock(Files(tmp_path))
    with pytest.raises(LockedRun):
        own.acquire()
    assert own.is_undecided
    assert other.exists()
    time.sleep(0.4)
    own.acquire()
    own.release()
    assert not other.exists()


def make_folder(path):
    path.mkdir()
    (path / "inside").touch()


DAMAGE = {
    "folder": make_folder,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "pipe": os.mkfifo,
    "nested": lambda path: path.write_text("[" * 4000),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "zeros": lambda path: path.write_bytes(bytes(2**23)),
    "number": lambda path: path.write_text('{"pid": 1e400, "host": [], "token": {}}'),
    "process": lambda path: path.write_text(
        json.dumps({"pid": 10**30, "host": socket.gethostname(), "beats": True, "token": "../x"})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("has_locks", [True, False])
def test_a_damaged_lock_file_stops_nobody(tmp_path, quick, no_locks, damage, has_locks):
    if not has_locks:
        no_locks()
    DAMAGE[damage](tmp_path / "writer.lock")
    with Store(tmp_path) as store:
        store.save("rollback", 1, new_state())
        with pytest.raises(LockedRun, match=f"process {os.getpid()} on"):
            Store(tmp_path).open()
    assert Path("/etc/passwd").stat().st_size > 0


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_lock_file_that_is_deleted_is_written_again_unless_another_took_it(
    tmp_path, quick, no_locks, has_locks
):
    if not has_locks:
        no_locks()
    with Store(tmp_path) as store:
        store.save("rollback", 1, new_state())
        (tmp_path / "writer.lock").unlink()
        store.save("rollback", 2, new_state())
        assert json.loads((tmp_path / "writer.lock").read_text())["pid"] == os.getpid()
        (tmp_path / "writer.lock").unlink()
        with Store(tmp_path) as other:
            with pytest.raises(SaveError, match=f"(held|taken over) by process {os.getpid()}"):
                store.save("rollback", 3, new_state())
            other.save("rollback", 4, new_state())
    assert [saved.step for saved in SavedRun(tmp_path).committed("rollback")] == [1, 2, 4]


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:40 / /nfs4 rw - nfs4 host:/x rw,vers=4.2,hard,local_lock=none,addr=1
24 22 0:41 / /nfs3 rw - nfs host:/x rw,vers=3,nolock,local_lock=all,addr=1
25 22 0:42 / /with\\040space rw shared:1 - lustre x rw,flock,lazystatfs
26 22 0:43 / /lustre rw - lustre x rw,localflock
27 22 0:44 / /s3 rw - fuse.s3fs s3fs rw
28 22 0:45 / /nfs4/disk rw - xfs /dev/vdb rw
29 28 0:46 / /over rw - fuse x rw
30 28 0:47 / /over rw - ceph x rw
"""
REACHING = {
    "/runs/a": True,
    "/nfs4/a": True,
    "/nfs3/a": False,
    "/nfs3a": True,
    "/with space/a": True,
    "/lustre/a": False,
    "/s3/a": False,
    "/nfs4/disk/a": True,
    "/over/a": True,
}


def test_kernel_locks_are_trusted_where_they_reach_all_hosts(tmp_path, monkeypatch):
    table = tmp_path / "mounts"
    table.write_text(MOUNTS)
    monkeypatch.setattr(lock, "MOUNTS_FILE", table)
    assert {path: kernel_locks_reach_all(Path(path)) for path in REACHING} == REACHING
    monkeypatch.setattr(lock, "MOUNTS_FILE", tmp_path / "missing")
    assert not kernel_locks_reach_all(Path("/runs/a"))
