"""Two processes never write one run; the error names the holder; a dead one is ignored.

python -m pytest tests/runs/test_store_lock.py
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_models import new_state
from tree import ROOT

from curry_train.runs import LockedRun, Store, lock

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
            rf"held by process {process.pid} on {socket.gethostname()} since 20..-"
            ".*which is running: end it"
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
        with pytest.raises(
            LockedRun, match=rf"held by process {process.pid} on .*which is running: end it"
        ):
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


@pytest.mark.parametrize("seconds", [30.0, 0.0])
def test_the_lock_of_a_process_that_has_just_died_is_waited_for(tmp_path, monkeypatch, seconds):
    """The kernel frees the lock of a killed process after its memory, which takes a moment."""
    dead = {
        "pid": os.getppid(),
        "host": socket.gethostname(),
        "since": "2026-01-01",
        "started": "1",
    }
    (tmp_path / "writer.lock").write_text(json.dumps(dead))
    take_lock = lock._lock
    tried = []

    def take_later(descriptor):
        tried.append(descriptor)
        return take_lock(descriptor) if len(tried) > 2 else False

    monkeypatch.setattr(lock, "_lock", take_later)
    monkeypatch.setattr(lock, "FREEING_SECONDS", seconds)
    if seconds:
        with Store(tmp_path):
            assert len(tried) == 3
    else:
        with pytest.raises(LockedRun, match="which is dead: wait until"):
            Store(tmp_path).open()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1'])
def test_a_torn_lock_file_of_a_dead_writer_is_ignored(tmp_path, text):
    (tmp_path / "writer.lock").write_text(text)
    with Store(tmp_path):
        pass


def test_a_reused_process_number_does_not_hold_the_lock(tmp_path):
    holder = {
        "pid": os.getppid(),
        "host": socket.gethostname(),
        "since": "2026-01-01",
        "started": "1",
    }
    (tmp_path / "writer.lock").write_text(json.dumps(holder))
    with Store(tmp_path):
        pass


def test_a_holder_is_alive_only_if_its_process_is_seen_to_run():
    own = lock.this_process()
    assert lock.is_alive(own) is True
    assert lock.is_alive({"pid": own["pid"], "host": own["host"]}) is True
    assert lock.is_alive(own | {"started": "1"}) is False
    for elsewhere in ({"machine": "another container"}, {"host": "another host"}, {"pid": "1"}):
        assert lock.is_alive(own | elsewhere) is None

    child = os.fork()
    if not child:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        # It has ended, and is listed until its parent asks for its status.
        os.kill(child, 0)
        assert lock.is_alive({"pid": child, "host": own["host"]}) is False
    finally:
        os.waitpid(child, 0)
    assert lock.is_alive({"pid": child, "host": own["host"]}) is False
