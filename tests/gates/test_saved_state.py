"""Tests of the gates of saves as they happen: they hold, and refuse what they can't see.

The faults that they fail on are in `faulty_checkpoints`, `faulty_journal` and `faulty_spikes`.

python -m pytest tests/gates/test_saved_state.py
"""

import os
import pickle
import threading
import time

import pytest
from saboteurs import case_of

from curry_train.gates import saved_state
from curry_train.gates.saved_state import FORGED_CALLS, DiskEvents, threads_delayed

GATES = (*saved_state.SAVED_STATE_GATES, *saved_state.JOURNAL_EVENT_GATES)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_gates_hold_on_the_right_implementation(gate):
    verdict = gate.run(case_of("small"))
    assert verdict.passed, verdict


def test_syncs_and_renames_are_recorded_in_their_order(tmp_path):
    original = os.fsync
    events = DiskEvents()
    with events.recorded(), (tmp_path / "a").open("wb") as stream:
        stream.write(b"12345")
        stream.flush()
        os.fsync(stream.fileno())
        (tmp_path / "a").rename(tmp_path / "b")
    assert os.fsync is original
    assert events.synced == {(tmp_path / "b").stat().st_ino: (1, 5)}
    assert events.renamed == [(2, str(tmp_path / "b"))]


def test_only_threads_that_start_inside_are_delayed():
    began = []
    with threads_delayed():
        start = time.perf_counter()
        thread = threading.Thread(target=lambda: began.append(time.perf_counter()))
        thread.start()
        thread.join()
    assert began[0] - start >= saved_state.THREAD_DELAY_SECONDS
    assert threading.getprofile() is None


@pytest.mark.parametrize("call", FORGED_CALLS, ids=lambda call: f"{call.module}.{call.name}")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_forged_pickle_really_calls(call, tmp_path):
    if call.module == "posix" and os.name != "posix":
        pytest.skip("the module posix is that of POSIX systems")
    pickle.loads(call.pickled(tmp_path / "made"))
    assert list(tmp_path.iterdir())
