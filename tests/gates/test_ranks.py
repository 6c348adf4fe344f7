"""Ranks return what they computed, fail as one, and their gradient syncs are counted.

python -m pytest tests/gates/test_ranks.py
"""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from curry_train.gates import Gate, two_ranks
from curry_train.gates.two_ranks import GradientSyncs

from ..rank_calls import run_on_ranks
from ..saboteurs.saboteurs import case_of, require, verdict_of


@pytest.fixture
def new_interpreters(monkeypatch):
    """Start new interpreters, not forks of one that has imported torch, as other tests do."""
    monkeypatch.setattr(two_ranks, "PYTHON_EXECUTABLE", sys.executable)


def counted_syncs(scale):
    model = DistributedDataParallel(nn.Linear(4, 4))
    with GradientSyncs() as none, model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    with GradientSyncs() as one:
        model(torch.ones(1, 4)).sum().backward()
        dist.all_reduce(torch.ones(1))  # outside of backward: not counted
    return scale * dist.get_rank(), none.num_calls, one.num_calls


def fails_on_one_rank():
    print("warned")  # a rank that waits has a log too
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like it")
    dist.barrier()


def test_each_rank_returns_its_result_and_syncs_are_counted(new_interpreters):
    answers = run_on_ranks(f"{__file__}:counted_syncs", scale=3)
    assert answers == [(0, 0, 1), (3, 0, 1)]


def test_the_error_of_a_rank_is_raised_with_its_message():
    with pytest.raises(RuntimeError, match=r"^ValueError: rank 1 does not like it"):
        run_on_ranks(f"{__file__}:fails_on_one_rank")


def dies_without_a_word():
    if dist.get_rank() == 1:
        os.write(2, b"out of fuel\n")
        os._exit(3)
    dist.barrier()


def is_killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_the_system_kills_leaves_its_gate_unchecked():
    gate = Gate("recompute/two-ranks", lambda case: run_on_ranks(f"{__file__}:is_killed"))
    require(gate.run(case_of("mlp")), None, "memory ran out (the system ended one of 2 ranks)")


def test_a_gpu_without_memory_leaves_a_gate_unchecked():
    def check(case):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    verdict = verdict_of(check, case_of("mlp"))
    assert verdict.passed is None
    assert verdict.hint.startswith("memory ran out (CUDA out of memory): try a smaller --batch")


def never_ends():
    time.sleep(60)


def test_a_rank_that_dies_ends_the_others_and_its_last_line_is_reported():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="out of fuel"):
        run_on_ranks(f"{__file__}:dies_without_a_word", timeout=60)
    assert time.monotonic() - start < 40


def test_ranks_that_never_end_are_stopped():
    with pytest.raises(RuntimeError, match="did not end within 3 s"):
        run_on_ranks(f"{__file__}:never_ends", timeout=3)
