"""A short torture of the checkpoint store finds nothing wrong, and its judge what is wrong.

    python -m pytest tests/benchmarks/test_torture.py

`make torture` runs the long one, and evidence/checkpoint_torture.json is its record.
"""

import json
import signal

import pytest

from curry_train.runs import Store
from torture import STOPPED, Blow, History, Life, RankReport, Setup, judge

from ..command_runs import in_python
from ..store_models import save_new
from ..tree import ROOT


def test_kills_and_signals_to_one_and_several_ranks_lose_nothing():
    """Run the torture in its own process with one thread, because it forks."""
    words = "-m torture --kills 8 --signals 8 --every 60"
    found = json.loads(in_python(*words.split(), cwd=ROOT).stdout)
    assert found["wrong"] == []
    assert found["kills"]["at_each_change"]["blows"] >= 1
    assert found["kills"]["total"] >= 5
    assert found["signals"]["total"] >= 2


# The judge of SIGTERM, on lives of two ranks that nobody lived.

LOSSES = {rank: {step: f"{rank}.{step}" for step in range(1, 13)} for rank in (0, 1)}
TERM = Blow(signal.SIGTERM, (0,), word="step")


def life(*, steps=(3, 3), statuses=(STOPPED, STOPPED), losses=LOSSES):
    """Two ranks that did these steps and ended with these statuses."""
    reports = []
    for rank, last in enumerate(steps):
        words = [("opening", None), ("handling", None)]
        for step in range(1, last + 1):
            words += [("step", step - 1), ("loss", [step, losses[rank][step]])]
        reports += [RankReport(10.0, rank, word, what) for word, what in words]
    return Life(reports, dict(enumerate(statuses)))


@pytest.fixture
def judged(tmp_path):
    with Store(tmp_path) as store:
        save_new(store, 3)

    history = History(tmp_path, Setup(2), LOSSES)
    return lambda life, struck_at=50.0: judge(history, life, TERM, None, struck_at)


def test_ranks_that_stop_after_the_same_saved_step_are_right(judged):
    assert judged(life()) == []


OTHER = {**LOSSES, 1: {**LOSSES[1], 2: "x"}}
WRONG = {
    "the ranks were at steps [3, 4]": life(steps=(3, 4)),
    "3 is the newest committed": life(steps=(4, 4)),
    "the ranks ended with {0: 143, 1: 134}": life(statuses=(STOPPED, 134)),
    "the ranks ended with {0: 143, 1: 0}": life(statuses=(STOPPED, 0)),
    "the ranks ended with {0: 143, 1: -9}": life(statuses=(STOPPED, -signal.SIGKILL)),
    "rank 1 was not as the straight run at step 2": life(losses=OTHER),
    "a rank hung": Life(hung=True),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_end_is_found(judged, words):
    assert any(words in one for one in judged(WRONG[words])), judged(WRONG[words])


@pytest.mark.usefixtures("judged")
def test_a_lost_commit_is_found(tmp_path):
    history = History(tmp_path, Setup(), newest=5)
    assert judge(history, Life(), Blow(signal.SIGKILL, (0,)), None, None) == [
        "step 5 was committed, and 3 is the newest"
    ]


def test_before_the_signal_is_handled_it_may_end_a_rank(judged):
    assert judged(life(steps=(0, 0), statuses=(-signal.SIGTERM, 1)), struck_at=5.0) == []
