"""A short torture of the checkpoint store finds nothing wrong, and its judge a lost commit.

    python -m pytest tests/benchmarks/test_torture.py

`make torture` runs the long one; its record is evidence/checkpoint_torture.json.
"""

import json
import os
import signal
import subprocess

import pytest
from store_models import new_state
from tree import ROOT
from warm_python import warm_python

from curry_train.runs import Store
from torture import Blow, History, Life, Setup, judge, wrongs


def run(*words):
    """Run the torture in its own process with one thread, because it forks."""
    paths = os.pathsep.join(
        [str(ROOT / folder) for folder in ("template", "benchmarks", "tests/runs")]
    )
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [warm_python(), "-m", "torture", *words, "--json", "-"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, cwd=ROOT
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
def test_kills_and_signals_lose_nothing():
    only = ("kills.at_each_change", "signals.one_rank")
    status, found = run("--signals", "2", "--every", "60", "--only", *only)
    assert (wrongs(found), status) == ([], 0)
    assert found["kills"]["at_each_change"]["blows"] >= 1
    assert found["signals"]["total"] >= 1


@pytest.mark.long
def test_kills_and_signals_to_one_and_several_ranks_lose_nothing():
    only = ("kills.two_ranks", "kills.three_ranks", "signals.two_ranks", "signals.three_ranks")
    status, found = run("--kills", "8", "--signals", "8", "--only", "kills.one_rank", *only)
    assert (wrongs(found), status) == ([], 0)
    assert found["kills"]["total"] >= 4
    assert found["signals"]["total"] >= 2


def test_a_lost_commit_is_found(tmp_path):
    with Store(tmp_path) as store:
        store.save("rollback", 3, new_state())
    history = History(tmp_path, Setup(), newest=5)
    assert judge(history, Life(), Blow(signal.SIGKILL, (0,)), None, None) == [
        "step 5 was committed, and 3 is the newest"
    ]
