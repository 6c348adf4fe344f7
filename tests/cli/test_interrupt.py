"""Ctrl-C ends `validate` at once with status 130, wherever it computes.

Run: `python -m pytest tests/cli/test_interrupt.py`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def processes_in(folder):
    """Return the processes that work in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("gates", [["recompute/off"], ["recompute", "sac"], ["*/two-ranks"]])
def test_an_interrupt_ends_all_processes_and_leaves_no_file(tmp_path, gates):
    (tmp_path / "deaf.py").write_text(MODEL)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = [word for gate in gates for word in ("--gate", gate)]
    command = [sys.executable, "-m", "curry_train", "validate", "--model", "deaf.py:build"]
    process = subprocess.Popen(
        [*command, *options],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for((tmp_path / "in_backward").exists)
    assert list(temporary.iterdir())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert "Error" not in errors
    wait_for(lambda: not processes_in(tmp_path))
    assert list(temporary.iterdir()) == []
