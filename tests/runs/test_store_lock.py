"""Two processes never write one run; the error names the holder; a dead one is ignored.

python -m pytest tests/runs/test_store_lock.py
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from store_models import new_state
from tree import ROOT

from curry_train.runs import LockedRun, SavedRun, SaveError, Store

HOLDER = """
import os, subprocess, sys, time
sys.path[:0] = {paths}
from curry_train.runs import Store
store = Store({root!r})
store.open()
{then}
print("held", flush=True)
time.sleep(600)
"""


def holder(root, then=""):
    code = HOLDER.format(
        paths=[str(ROOT / "template"), str(ROOT / "tests/runs")], root=str(root), then=then
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_refused_with_the_holder_and_a_dead_holder_is_recognised(tmp_path):
    process = holder(tmp_path)
    try:
        holder_named = (
            rf"held by process {process.pid} on {socket.gethostname()} since 20..-.*: end it"
        )
        with pytest.raises(LockedRun, match=holder_named):
            Store(tmp_path).save("rollback", 1, new_state())
        assert Store(tmp_path).committed("rollback") == []  # reading needs no lock
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with Store(tmp_path) as store:
        store.save("rollback", 1, new_state())


FORK = "if not os.fork():\n    os.close(1)\n    {then}\n    time.sleep(30)\n    os._exit(0)\n"


def killed(process):
    """Kill without waiting, so that the process stays a zombie and keeps its number."""
    os.kill(process.pid, signal.SIGKILL)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_the_lock_of_a_killed_process_is_free_at_once_though_a_child_lives(tmp_path):
    """Cover DataLoader workers, which outlive their parent, and containers that reap no zombies."""
    process = holder(
        tmp_path, then=FORK.format(then="print(os.getpid(), file=open('child', 'w'), flush=True)")
    )
    try:
        killed(process)
        began = time.monotonic()
        with Store(tmp_path):
            assert time.monotonic() - began < 5
        os.kill(int((tmp_path / "child").read_text()), 0)  # the process is alive
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_forked_child_neither_writes_nor_releases_the_lock(tmp_path):
    """Refuse saves of a forked child, which could collide with the parent's."""
    then = """
if not os.fork():
    os.close(1)
    try:
        store.discard("rollback/step-00000001.dcp")
    except Exception as error:
        print(error, file=open("message", "w"))
    store.close()
    os._exit(0)
os.wait()
"""
    process = holder(tmp_path, then=then)
    try:
        assert "was forked from the process that writes to" in (tmp_path / "message").read_text()
        with pytest.raises(LockedRun, match=rf"held by process {process.pid} on .*: end it"):
            Store(tmp_path).open()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_two_stores_of_one_process_are_two_writers(tmp_path):
    with Store(tmp_path), pytest.raises(LockedRun, match=f"process {os.getpid()} on"):
        Store(tmp_path).open()
    with Store(tmp_path):
        pass  # the lock was released


def test_a_lock_is_waited_for(tmp_path):
    """The kernel frees the lock of a killed process after its memory, which takes a moment."""
    first = Store(tmp_path)
    first.open()
    threading.Timer(0.5, first.close).start()
    second = Store(tmp_path)
    second.open(wait_seconds=20)
    second.close()


DAMAGE = {
    "nested": lambda path: path.write_text("[" * 4000),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "zeros": lambda path: path.write_bytes(bytes(2**23)),
    "list": lambda path: path.write_text("[]"),
    "torn": lambda path: path.write_text('{"pid": 1'),
}


@pytest.mark.parametrize("name", ["writer.lock", "writer.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_lock_file_stops_nobody(tmp_path, damage, name):
    DAMAGE[damage](tmp_path / name)
    with Store(tmp_path) as store:
        store.save("rollback", 1, new_state())
        with pytest.raises(LockedRun, match=f"process {os.getpid()} on"):
            Store(tmp_path).open()


def test_a_lock_file_that_is_deleted_does_not_let_two_processes_commit(tmp_path):
    with Store(tmp_path) as store:
        store.save("rollback", 1, new_state())
        (tmp_path / "writer.json").unlink()
        store.save("rollback", 2, new_state())
        (tmp_path / "writer.lock").unlink()
        with Store(tmp_path) as other:
            with pytest.raises(SaveError, match=f"taken over by process {os.getpid()}"):
                store.save("rollback", 3, new_state())
            other.save("rollback", 4, new_state())
    assert [saved.step for saved in SavedRun(tmp_path).committed("rollback")] == [1, 2, 4]
