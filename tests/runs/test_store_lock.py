"""Two processes never write one run; the error names the holder; a dead one is ignored.

python -m pytest tests/runs/test_store_lock.py
"""

import copy
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from curry_train.runs import LockedRun, SavedRun, SaveError, Store

from ..store_models import new_state, save_new
from ..tree import ROOT

HOLDER = """
import os, subprocess, sys, time
from curry_train.runs import Store
store = Store(".")
store.open()
{then}
print("held", flush=True)
time.sleep(600)
"""


def holder(root, then=""):
    variables = os.environ | {"PYTHONPATH": f"{ROOT}/template"}
    command = [sys.executable, "-c", HOLDER.format(then=then)]
    process = subprocess.Popen(command, cwd=root, env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


# The child lives on, as a DataLoader worker does for seconds.
FORK = """
if not os.fork():
    os.close(1)
    try:
        store.discard("rollback/step-00000001.dcp")
    except Exception as error:
        print(error, file=open("message", "w"))
    store.close()
    print(os.getpid(), file=open("child", "w"), flush=True)
    time.sleep(30)
    os._exit(0)
while not os.path.exists("child") or not open("child").read():
    time.sleep(0.01)
"""


def killed(process):
    """Kill without waiting, so that the process stays a zombie and keeps its number."""
    os.kill(process.pid, signal.SIGKILL)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_one_process_writes_and_its_death_frees_the_lock_though_a_child_lives(tmp_path):
    """Cover containers that reap no zombies too."""
    process = holder(tmp_path, then=FORK)
    child = int((tmp_path / "child").read_text())
    try:
        # The child has neither written nor released the lock.
        assert (
            "this process was forked from the process that writes to "
            in (tmp_path / "message").read_text()
        )
        held = rf"held by process {process.pid} on {socket.gethostname()} since 20..-.*: end it"
        with pytest.raises(LockedRun, match=held):
            Store(tmp_path).save("rollback", 1, new_state())
        assert Store(tmp_path).committed("rollback") == []  # reading needs no lock
        killed(process)
        began = time.monotonic()
        with Store(tmp_path) as store:
            assert time.monotonic() - began < 5
            save_new(store)
        os.kill(child, 0)  # the child is alive
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


def test_two_stores_of_one_process_are_two_writers(tmp_path):
    with (
        Store(tmp_path),
        pytest.raises(LockedRun, match=f"{os.getpid()} on {socket.gethostname()} "),
    ):
        Store(tmp_path).open()
    # The lock was released; a store that is not open may be given to another process.
    with copy.deepcopy(Store(tmp_path)):
        pass


def test_a_lock_is_waited_for(tmp_path):
    """The kernel frees the lock of a killed process after its memory, which takes a moment."""
    first = Store(tmp_path)
    first.open()
    threading.Timer(0.5, first.close).start()
    second = Store(tmp_path)
    second.open(wait_seconds=20)
    second.close()


def test_a_damaged_lock_file_stops_nobody(store, tmp_path):
    # Cut off, deeper than the parser goes, and longer than the file may be.
    for damaged in ("{", "[" * 4000, "\0" * 10_000_000):
        (tmp_path / "writer.txt").write_text(damaged)
        with pytest.raises(LockedRun, match="another process that just started: end it, or"):
            Store(tmp_path).open()
    save_new(store)


def test_a_lock_file_that_is_deleted_does_not_let_two_processes_commit(store, tmp_path):
    save_new(store)
    (tmp_path / "writer.txt").unlink()
    save_new(store, 2)
    (tmp_path / "writer.lock").unlink()
    with Store(tmp_path) as other:
        with pytest.raises(
            SaveError, match=f"was taken over by process {os.getpid()} .*: this process saves n"
        ):
            save_new(store, 3)
        other.save("rollback", 4, new_state())
    assert [saved.step for saved in SavedRun(tmp_path).committed("rollback")] == [1, 2, 4]
