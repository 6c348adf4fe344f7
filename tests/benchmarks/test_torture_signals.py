"""The torture by signals finds a lost step, another loss, a wrong status and a hang.

python -m pytest tests/benchmarks/test_torture_signals.py
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from store_models import new_state
from tree import ROOT

from curry_train.runs import Store
from torture_ranks import RankReport, Ranks
from torture_signals import STOPPED, Life, judge

LOSSES = [[f"{rank}.{step}" for step in range(1, 13)] for rank in (0, 1)]


@pytest.fixture
def folder(tmp_path):
    with Store(tmp_path) as store:
        store.save("rollback", 3, new_state())
    return tmp_path


def life(*, steps=(3, 3), statuses=(STOPPED, STOPPED), phase="step", losses=LOSSES, sent_at=50.0):
    """Make a life of two ranks that did these steps and ended with these statuses."""
    reports = []
    for rank, (done, at) in enumerate(zip(steps, (10.0, 11.0), strict=True)):
        reports += [RankReport(at, rank, "opening"), RankReport(at + 1, rank, "resumed", 0)]
        reports += [
            RankReport(at + 2, rank, "loss", [step, losses[rank][step - 1]])
            for step in range(1, done + 1)
        ]
    raw = {rank: status << 8 if status >= 0 else -status for rank, status in enumerate(statuses)}
    return Life(Ranks([0, 0], 0, "", reports, raw), phase, "one rank", sent_at)


def test_ranks_that_stop_after_the_same_saved_step_are_right(folder):
    found = life()
    assert judge(found, folder, LOSSES, 2) == 3
    assert found.wrong == []


OTHER = [LOSSES[0], ["x", *LOSSES[1][1:]]]
PLANTED = {
    "the ranks were at steps": life(steps=(3, 4)),
    "3 is the newest committed one": life(steps=(4, 4)),
    "the ranks ended with": life(statuses=(STOPPED, 134)),
    "ended with [143, 0]": life(statuses=(STOPPED, 0)),
    "ended with [143, -9]": life(statuses=(STOPPED, -signal.SIGKILL)),
    "rank 1 has other losses": life(losses=OTHER),
}


@pytest.mark.parametrize("words", PLANTED)
def test_a_planted_fault_is_found(folder, words):
    found = PLANTED[words]
    judge(found, folder, LOSSES, 0)
    assert any(words in line for line in found.wrong), found.wrong


def test_a_lost_commit_and_a_hang_are_found(folder):
    found = life()
    found.hung = True
    judge(found, folder, LOSSES, 5)
    assert "step 5 was committed, and 3 is the newest" in found.wrong
    assert "a rank hung: [143, 143]" in found.wrong


def test_before_the_run_is_opened_the_signal_may_end_the_rank(folder):
    found = life(steps=(0, 0), statuses=(-signal.SIGTERM, 1), phase="warm-up", sent_at=5.0)
    judge(found, folder, LOSSES, 3)
    assert found.wrong == []


@pytest.mark.long
def test_signals_to_real_ranks_lose_nothing(tmp_path):
    paths = os.pathsep.join(str(ROOT / each) for each in ("template", "benchmarks", "tests/runs"))
    script = str(ROOT / "benchmarks/torture_signals.py")
    done = subprocess.run(
        [sys.executable, script, "--signals", "8", "--json", str(tmp_path / "signals.json")],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "signals.json").read_text())["signals"] >= 8
