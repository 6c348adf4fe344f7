"""The check that plants a spike: its result, its output, and that it can fail.

python -m pytest tests/cli/test_spike_check.py
"""

import copy
import logging
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from curry_train.cli import spike_check as check
from curry_train.cli.spike_check import spike_check
from curry_train.runs import RunError
from curry_train.runs.spike import AttachedWatch

from ..command_runs import flat, ran, read_json, require_narrow

TINY = (
    "model=tests.training_models:tiny",
    "device=cpu",
    "batch_size=16",
    "microbatch=16",
    "checkpoint.rollback_every=10",
    "evaluate={every: 20, samples: 16}",
    "spike={action: rollback, window: 16}",
)
CHECK = f"runs spike-check --steps 44 --at 34 --runs kept {shlex.join(TINY)}"
SIZES = {"steps": 44, "at": 34, "num_windows": 4}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Run the command once; return its end, what it wrote, and its folder."""
    folder = tmp_path_factory.mktemp("checked")
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(logging.getLogger("curry_train.runs.spike"), "filter", heard.append)
        done = ran(CHECK, "--windows 4 --json spike.json")
    assert not heard, "the result has what the log would say"
    return done, read_json(folder / "spike.json"), folder


def test_the_recovered_run_equals_one_that_never_saw_the_samples(checked):
    _, found, _ = checked
    assert found["held"] is True
    assert (found["rollbacks"], found["back_to"], found["difference"]) == (1, 20, None)
    assert 1 <= found["found_after"] <= found["patience"] == 3
    losses = found["losses"]
    assert losses["recovered"] == losses["without"] != losses["through"]
    assert found["skipped"] == [[(34 - 9) * 16, (36 + 8) * 16]]


def test_the_command_prints_the_result_and_keeps_the_runs(checked):
    done, found, folder = checked
    lines = done.stdout.splitlines()
    assert lines[0] == "planted: bad samples in steps 34 to 37 of 44"
    assert lines[-1] == "equal to the bit to the run that never saw them"
    require_narrow(done.stdout)
    names = {"recovered", "without", "through"}
    assert found["dev_losses"].keys() == names
    assert {path.name for path in (folder / "kept").iterdir()} == {f"{name}-001" for name in names}
    # The box of a planted step could not be replayed.
    assert "box" not in done.stderr


def test_a_rollback_that_restores_no_weights_is_caught(monkeypatch):
    original = AttachedWatch.go_back

    def stays(watch, spike, state, load):
        kept = copy.deepcopy(state.model.state_dict())
        recovery = original(watch, spike, state, load)
        state.model.load_state_dict(kept)
        return recovery

    monkeypatch.setattr(AttachedWatch, "go_back", stays)
    found = spike_check(Path(), TINY, **SIZES)
    assert not found["held"]
    assert "is" in found["difference"]


def test_a_missed_spike_is_reported():
    text = flat(ran(CHECK, "--windows 1 --json x.json", status=1).stdout)
    assert "NOT found: no 3 steps in a row (spike.patience) had a loss above the limit" in text
    assert [path.name for path in Path("kept").iterdir()] == ["recovered-001"]
    assert read_json("x.json")["losses"].keys() == {"recovered"}


def test_a_training_that_was_stopped_gives_no_result(monkeypatch):
    original = check.train_run

    def stopped(run, *, watch):
        return replace(original(run, watch=watch), ended_by="data")

    monkeypatch.setattr(check, "train_run", stopped)
    with pytest.raises(
        RunError,
        match="recovered-001 was ended after step 44 of 44 by data, so nothing was checked",
    ):
        spike_check(Path(), TINY, **SIZES)
