"""A rank that fails, dies or falls silent ends the others' wait, with its error.

python -m pytest tests/runs/test_waits.py
"""

import contextlib
import json
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from store_models import new_state, train

from curry_train.gates.two_ranks import run_on_ranks
from curry_train.runs import BackgroundSaver, SavedRun, SaveError, Store, background, heartbeat
from curry_train.runs.background import PartNotes
from curry_train.runs.heartbeat import Heartbeat
from curry_train.runs.lock import this_process
from curry_train.runs.policy import SavingPolicy
from curry_train.runs.policy_config import PolicyConfig
from curry_train.runs.resume import load_chosen

SAVES = ("foreground", "background", "policy")


class Counter:
    """A part of the state whose methods can fail."""

    fails_in = ""

    def state_dict(self):
        if self.fails_in == "state_dict":
            raise KeyError("no counter")
        return {"count": 3}

    def load_state_dict(self, state):
        if self.fails_in == "load_state_dict":
            raise KeyError("no count")


def outcome(act):
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the test compares the errors of the ranks
        return f"{type(error).__name__}: {error}"
    return "no error"


def save(how, folder, state):
    with Store(folder) as store:
        if how == "foreground":
            store.save("rollback", state.step, state)
        elif how == "background":
            with BackgroundSaver(store) as saver:
                saver.save("rollback", state.step, state)
        else:
            SavingPolicy(store, PolicyConfig(rollback_every=1)).after_step(state.step, state, {})


def one_rank_fails(folder):
    """Return each rank's error where only rank 1 can't give or take a part of the state."""
    counter = Counter()
    state = new_state(extra={"counter": counter})
    train(state, 1)
    found = {}
    for how in SAVES:
        counter.fails_in = "state_dict" if dist.get_rank() else ""
        found[how] = [outcome(lambda how=how: save(how, f"{folder}/{how}", state))]
        counter.fails_in = ""
        found[how].append(outcome(lambda how=how: save(how, f"{folder}/{how}", state)))
    counter.fails_in = "load_state_dict" if dist.get_rank() else ""
    found["resume"] = [outcome(lambda: load_chosen(f"{folder}/policy", state)), "no error"]
    return found


def test_an_error_while_state_is_taken_or_restored_is_raised_on_all_ranks(tmp_path):
    first, second = run_on_ranks(f"{__file__}:one_rank_fails", folder=str(tmp_path), timeout=60)
    for how in (*SAVES, "resume"):
        assert first[how][0].partition(": ")[0] in ("SaveError", "OtherRank"), how
        assert "rank 1: " in first[how][0], how
        assert "KeyError: 'no count" in first[how][0], how
        assert "KeyError: 'no count" in second[how][0], how
        assert "rank 1" not in second[how][0], how
        assert first[how][1] == second[how][1] == "no error", how
    for how in SAVES:
        assert [saved.step for saved in SavedRun(tmp_path / how).committed("rollback")] == [1]


@pytest.fixture
def writing(tmp_path):
    """A save of two ranks, as rank 0 sees it; the other rank is this process at first."""
    with Store(tmp_path) as store:
        begun = store.begin("rollback", 1, new_state())
        begun.ranks.size = 2
        begun.processes.append(this_process())
        yield begun


def test_rank_0_does_not_wait_for_the_part_of_a_dead_process(writing):
    """Kill the other process while rank 0 waits; the wait ends at once, far before its timeout."""
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    writing.processes[1] = {**this_process(), "pid": other.pid, "started": None}
    threading.Timer(0.3, other.kill).start()
    began = time.monotonic()
    with pytest.raises(SaveError, match=f"no part of rank 1: its process {other.pid} ended"):
        PartNotes(writing, timeout=60).collect(writing.write())
    assert 0.2 < time.monotonic() - began < 10
    other.communicate()


def test_a_part_that_was_written_before_its_process_died_counts(writing):
    part = writing.write()
    content = json.dumps({"error": "", "part": part.to_json()})
    writing.files.write(f"{writing.folder}/rank-1.part", content.encode())
    writing.processes[1] = {**this_process(), "pid": 2**22 + 1}
    assert PartNotes(writing, timeout=60).collect(part) == [part, part]


def test_rank_0_waits_for_a_slow_rank_and_not_for_a_silent_one(writing, monkeypatch):
    """Let the other rank show life for a while, on a host that rank 0 can't see, and then stop."""
    monkeypatch.setattr(background, "PART_SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    writing.processes[1] = {**this_process(), "host": "elsewhere"}
    writing.ranks.rank = 1
    with contextlib.ExitStack() as alive:
        alive.enter_context(PartNotes(writing, timeout=60).showing_life())
        other = alive.pop_all()
    writing.ranks.rank = 0
    threading.Timer(1.0, other.close).start()
    began = time.monotonic()
    with pytest.raises(SaveError, match="rank 1: it has shown no sign of life for 0 s"):
        PartNotes(writing, timeout=60).collect(writing.write())
    assert 1.2 < time.monotonic() - began < 10


def test_beats_end_with_their_thread_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    files = Store(tmp_path).files
    beats = Heartbeat(files, "beat")
    beats.start()
    until = time.monotonic() + 5
    while files.read("beat") == b"0\n" and time.monotonic() < until:
        time.sleep(0.01)
    assert int(files.read("beat")) > 0
    beats.stop()
    assert files.names("") == []
