"""Ctrl-C and SIGTERM end `validate` at once, wherever it computes.

Run: `python -m pytest tests/cli/test_interrupt.py`.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from ..command_runs import started, wait_for

MODEL = """
import torch
from pathlib import Path
from torch import nn
from curry_train.workloads import Workload

class Deaf(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        Path("in_backward").touch()
        for _ in range(100_000):
            try:
                torch.mm(torch.ones(300, 300), torch.ones(300, 300))
            except BaseException:  # as a model that retries whatever happens
                pass
        return gradient

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x):
        return torch.relu(self.inner(x))

def build():
    return Workload(
        "deaf",
        build=lambda: nn.Sequential(Block(), Block()),
        batch=lambda size: torch.randn(size, 8),
        loss=lambda module, batch: Deaf.apply(module(batch)).square().sum(),
    )
"""


def processes_in(folder):
    """Return the other processes that work in a folder; those that have ended do not."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder and entry.name != str(os.getpid()):
                found.append((entry / "cmdline").read_text())
        except OSError:  # it has ended, or is not ours
            continue
    return found


# Supervised as `validate` is, with a worker, and deaf too; it imports no torch.
SUPERVISED = """
import subprocess, sys, tempfile, time
from curry_train.cli.screen import supervise

supervise()
tempfile.mkdtemp()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("started", "w").close()
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


def started_in(folder, *words):
    """Start a command with a temporary folder inside of `folder`, and return its process."""
    (folder / "deaf.py").write_text(MODEL)
    (folder / "supervised.py").write_text(SUPERVISED)
    (folder / "temporary").mkdir()
    path = os.pathsep.join([str(folder), *sys.path])
    environment = {"TMPDIR": str(folder / "temporary"), "PYTHONPATH": path}
    return started(sys.executable, *words, cwd=folder, **environment)


def assert_ended(process, folder, status):
    """Wait until it has ended with this status, without an error, a process or a file left."""
    _, errors = process.communicate(timeout=20)
    assert process.returncode == status, errors
    lines = errors.strip().splitlines()
    assert lines[-1] == {130: "interrupted", 143: "terminated"}[status], errors
    assert not any(word in errors for word in ("Traceback", "Error", "Warning", "Aborted"))
    wait_for(lambda: not processes_in(folder))
    assert list((folder / "temporary").iterdir()) == []


needs_proc = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux's /proc")


@needs_proc
def test_an_interrupt_ends_all_processes_and_leaves_no_file(tmp_path):
    words = ["-m", "curry_train", "validate", "--model", "deaf.py:build"]
    process = started_in(tmp_path, *words, "--gate", "recompute/off")
    wait_for((tmp_path / "in_backward").exists)
    assert list((tmp_path / "temporary").iterdir())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert_ended(process, tmp_path, 130)


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_termination_and_a_kill_end_the_workers_too(tmp_path, number):
    process = started_in(tmp_path, "supervised.py")
    wait_for((tmp_path / "started").exists)
    process.send_signal(number)
    if number == signal.SIGTERM:
        assert_ended(process, tmp_path, 143)
    else:
        process.communicate(timeout=20)
        wait_for(lambda: not processes_in(tmp_path))
