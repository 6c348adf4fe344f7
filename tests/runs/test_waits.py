"""A rank that fails, dies or falls silent ends the others' wait, with its error.

python -m pytest tests/runs/test_waits.py
"""

import contextlib
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from curry_train.gates.two_ranks import RankProcesses
from curry_train.runs import (
    BackgroundSaver,
    PolicyConfig,
    SavedRun,
    SaveError,
    SavingPolicy,
    Store,
    load_chosen,
)

from ..command_runs import wait_for
from ..rank_calls import run_on_ranks
from ..store_models import At, CountedFiles, new_state, train

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
    first, second = run_on_ranks(f"{__file__}:one_rank_fails", folder=str(tmp_path))
    for how in (*SAVES, "resume"):
        error, later = first[how]
        own, own_later = second[how]
        assert error.partition(": ")[0] in ("SaveError", "OtherRank"), how
        assert "rank 1: " in error, how
        assert "KeyError: 'no count" in error, how
        assert "KeyError: 'no count" in own, how
        assert "rank 1" not in own, how
        assert later == own_later == "no error", how
    for how in SAVES:
        assert [saved.step for saved in SavedRun(tmp_path / how).committed("rollback")] == [1]


def one_rank_ends(folder):
    """End rank 1 while it writes in the background, and keep the error of rank 0."""
    state = new_state()
    train(state, 1)
    with CountedFiles() as files, Store(folder) as store, contextlib.suppress(SaveError):
        store.save("rollback", 1, state)
        saver = BackgroundSaver(store)
        if dist.get_rank():
            files.ask = At(3, lambda: os._exit(7))
        saver.save("rollback", 2, state)
        # Written whole at once: the other process looks for it.
        Path(folder, "new").write_text(str(saver._running.exception()))
        Path(folder, "new").rename(Path(folder, "error"))


def test_a_rank_that_dies_ends_the_wait_of_the_others_and_leaves_what_was_committed(
    tmp_path, monkeypatch
):
    end_all = RankProcesses._raise

    def wait_for_rank_0(*arguments):
        """Let the other rank notice before it is ended too."""
        wait_for((tmp_path / "error").exists)
        end_all(*arguments)

    monkeypatch.setattr(RankProcesses, "_raise", wait_for_rank_0)
    with pytest.raises(RuntimeError):
        run_on_ranks(f"{__file__}:one_rank_ends", folder=str(tmp_path))
    assert "another rank ended" in (tmp_path / "error").read_text()
    # As a kill of both ranks leaves it.
    (tmp_path / "rollback/.step-00000003.dcp.partial-0123456789abcdef").mkdir()
    store = Store(tmp_path)
    # The rank that was killed with the other one may take a moment to end.
    store.open(wait_seconds=30)
    with store:
        assert [saved.step for saved in store.committed("rollback")] == [1]
        store.verify(store.latest())
        assert list((tmp_path / "rollback").glob(".*")) == []
