"""Record recoveries from spikes on disk, and recover in any training loop.

python -m pytest tests/runs/test_spike_recovery.py
"""

import json
import math
import re
from dataclasses import asdict

import pytest

from curry_train.runs import RunError, SavedCheckpoint
from curry_train.runs.random_state import DataPosition
from curry_train.runs.resume import NothingSaved, Resumed
from curry_train.runs.spike import (
    RECOVERIES_FILE_NAME,
    AttachedWatch,
    Recovery,
    Spike,
    SpikeNotRecovered,
    read_recoveries,
)

from ..store_models import new_state


@pytest.mark.parametrize("text", ["", "{}x", "[3]", '[{"spike": 1}]', '[{"spike": "1"}]', "\0\xff"])
def test_an_invalid_file_of_recoveries_is_an_error_with_its_purpose(tmp_path, text):
    (tmp_path / RECOVERIES_FILE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(
        RunError,
        match=r"recoveries.json lists the samples that are skipped, and can't be read: "
        r"restore it, or remove it to train on those samples again \(.*\)$",
    ):
        read_recoveries(tmp_path)


@pytest.mark.parametrize(
    ("spike", "messages"),
    [
        (None, []),
        ({"action": "rollback"}, []),
        (
            {"action": "warn"},
            [
                "spike: a loss or a gradient of step 7 is not finite; with spike.action=rollback "
                "the run rolls back and skips its samples"
            ],
        ),
    ],
)
def test_a_spike_is_a_warning_where_the_run_does_not_roll_back(spike, messages, caplog):
    assert (AttachedWatch(spike, DataPosition()).judge(7, math.nan) is None) is (spike is None)
    assert caplog.messages == messages


@pytest.fixture
def state():
    return new_state()


@pytest.fixture
def watch(tmp_path):
    """A watch of steps of two batches."""
    data = DataPosition()
    data.advance()
    data.advance()
    data.stepped()
    watch = AttachedWatch({"action": "rollback", "window": 16, "skip_around": 2}, data)
    watch.begin(tmp_path)
    return watch


def loading(state, saved, asked):
    """Load the newest of the saved steps that lies before the one that is asked for."""

    def load(what):
        asked.append(what)
        before = [step for step in saved if step < int(what.removeprefix("before-"))]
        if not before:
            raise NothingSaved(what)
        state.step = max(before)
        state.position = 2 * state.step
        return Resumed(SavedCheckpoint("rollback", state.step, {}), (), {}, True)

    return load


def test_each_rollback_skips_twice_as_much_and_the_fourth_is_an_error(
    watch, state, tmp_path, caplog
):
    asked = []
    spike = Spike(25, 23, 9.0, 2.0, 3.0)
    with pytest.raises(
        SpikeNotRecovered,
        match=r"^loss 9 at step 25, .*: there is nothing to go back to. Save earlier, with a "
        "lower rollback_every, or set the spike's action to warn$",
    ):
        watch.go_back(spike, state, loading(state, (), []))
    load = loading(state, (18, 22), asked)
    found = [watch.go_back(spike, state, load) for _ in range(3)]
    # Steps 21 to 27 of two batches, 19 to 29 with those skipped already, and 23 to 33.
    assert found == [
        Recovery(25, 18, 40, 54, 1),
        Recovery(25, 18, 36, 72, 2),
        Recovery(25, 22, 72, 94, 3),
    ]
    assert asked == ["before-21", "before-19", "before-15", "before-23"]
    assert read_recoveries(tmp_path) == found
    assert caplog.messages[0] == (
        f"spike: {spike.words}. Rolled back to rollback/step-00000018.dcp, without the data at "
        "positions 40 to 53 (attempt 1 of 3)"
    )
    message = (
        f"{spike.words}: it came back after 3 rollbacks, which skipped the samples at positions "
        "40 to 53, 36 to 71, 72 to 93. So the samples are not the cause: look at the gradients "
        "before the spike (curry-train grad-flow), lower the learning rate, and go on with "
        'saving(..., resume="before-7") once, or --resume RUN@before-7'
    )
    with pytest.raises(SpikeNotRecovered, match=f"^{re.escape(message)}$"):
        watch.go_back(spike, state, load)


# A rollback within a window of the last one is another attempt, which skips more, also in a run
# that was started again. No state is before the first step.
@pytest.mark.parametrize(
    ("step", "attempt", "asked"), [(41, 3, "before-33"), (42, 1, "before-40"), (1, 1, "before-1")]
)
def test_rollbacks_near_each_other_are_attempts_at_one_place(
    watch, state, tmp_path, step, attempt, asked
):
    earlier = [Recovery(9, 0, 3, 4, 1), Recovery(25, 0, 3, 4, 2)]
    (tmp_path / RECOVERIES_FILE_NAME).write_text(json.dumps([asdict(one) for one in earlier]))
    watch.begin(tmp_path)
    found = []
    recovery = watch.go_back(
        Spike(step, step, math.nan, None, None), state, loading(state, (0,), found)
    )
    assert (recovery.attempt, found) == (attempt, [asked])
    # Position 3 is skipped already.
    assert recovery.start == (0 if step == 1 else 2 * (int(asked.removeprefix("before-")) - 1) + 1)
