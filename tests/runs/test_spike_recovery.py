"""Record recoveries from spikes on disk, and recover in any training loop.

python -m pytest tests/runs/test_spike_recovery.py
"""

import json

import pytest
from store_models import new_state, train

from curry_train.data import Samples, Stream
from curry_train.runs import Files, Recoveries, RunError, SavingPolicy, Store
from curry_train.runs.policy_config import PolicyConfig, SpikeConfig
from curry_train.runs.resume import NothingSaved
from curry_train.runs.spike import RECOVERIES_FILE_NAME, Recovery, Spike, SpikeNotRecovered, recover


def spike(step, first=None):
    return Spike(step, first or step, 9.0, 2.0, 3.0)


def recovery(step, *, attempt=1, **facts):
    return Recovery(step, back_to=step - 10, start=0, stop=1, attempt=attempt, **facts)


def test_a_recorded_recovery_is_read_by_the_next_process(tmp_path):
    files = Files(tmp_path)
    first = Recoveries(files)
    first.add(recovery(100, learning_rate=0.5, slower_until=150), write=True)
    first.add(recovery(120, attempt=2), write=True)
    assert Recoveries(files).done == first.done


def test_ranks_that_do_not_write_know_the_recovery(tmp_path):
    recoveries = Recoveries(Files(tmp_path))
    recoveries.add(recovery(100), write=False)
    assert len(recoveries.done) == 1
    assert not (tmp_path / RECOVERIES_FILE_NAME).exists()


def test_attempts_are_counted_per_place(tmp_path):
    recoveries = Recoveries(Files(tmp_path))
    assert recoveries.attempt(100, within=64) == 1
    recoveries.done = [recovery(100), recovery(150), recovery(210)]
    assert recoveries.attempt(230, within=64) == 4
    assert recoveries.attempt(300, within=64) == 1
    recoveries.done = [recovery(100)]
    assert recoveries.attempt(164, within=64) == 2
    assert recoveries.attempt(165, within=64) == 1
    recoveries.done = [recovery(100), recovery(300)]
    assert recoveries.attempt(301, within=64) == 2
    assert recoveries.attempt(290, within=64) == 2  # an earlier step than before, after going back


def test_lowered_rates_multiply_in_steps_where_they_overlap(tmp_path):
    recoveries = Recoveries(Files(tmp_path))
    recoveries.done = [
        recovery(100, learning_rate=0.5, slower_until=200),  # from step 90 on
        recovery(120, learning_rate=0.5, slower_until=150),  # from step 110 on
        recovery(400),
    ]
    assert [recoveries.factor(done) for done in (89, 90, 110, 149, 150, 200, 395)] == [
        1,
        0.5,
        0.25,
        0.25,
        0.5,
        1,
        1,
    ]


@pytest.mark.parametrize(
    "text", ["", "{}x", "[3]", '[{"spike": 1}]', '[{"spike": -1}]', '[{"spike": "1"}]', "\0\xff"]
)
def test_an_invalid_file_of_recoveries_is_an_error_with_its_purpose(tmp_path, text):
    (tmp_path / RECOVERIES_FILE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match="lists the samples that are skipped, and can't be read"):
        Recoveries(Files(tmp_path))


def line(position, windows):
    return position + 10 * windows


class Loads:
    """Stand-in for a policy: loads its newest state before the requested step."""

    def __init__(self, *steps):
        self.steps = steps
        self.asked = []
        self.step = 200
        self.position = 2000

    def __call__(self, what):
        self.asked.append(what)
        before = int(what.removeprefix("before-"))
        found = [step for step in self.steps if step < before]
        if not found:
            raise NothingSaved(f"no state from before step {before}")
        self.step, self.position = max(found), 10 * max(found)
        return type("Resumed", (), {"saved": None})()


CONFIG = SpikeConfig(action="rollback", patience=3, skip_around=4, attempts=3)


def went_back(loads, recoveries, what, config=CONFIG):
    done = recover(
        what,
        config,
        state=loads,
        load=loads,
        after=line,
        recoveries=recoveries,
        go_on="--resume run-7@{}",
    )
    return done.recovery


def test_skipped_data_covers_all_high_steps_with_a_margin(tmp_path):
    """Count positions: the window of step n begins at position 10 x (n - 1)."""
    done = went_back(Loads(50, 100, 150), Recoveries(Files(tmp_path)), spike(162, first=160))
    assert (done.back_to, done.start, done.stop) == (150, 1550, 1660)


def test_each_attempt_skips_twice_as_much_and_the_last_is_an_error(tmp_path):
    recoveries, loads = Recoveries(Files(tmp_path)), Loads(50, 100, 150)
    spans = [went_back(loads, recoveries, spike(162, first=160)) for _ in range(3)]
    assert [(one.start, one.stop, one.attempt) for one in spans] == [
        (1550, 1660, 1),
        (1510, 1700, 2),
        (1430, 1780, 3),
    ]
    with pytest.raises(SpikeNotRecovered, match=r"after 3 rollbacks.*--resume run-7@before-128"):
        went_back(loads, recoveries, spike(162, first=160))


def test_without_a_state_before_the_margin_the_newest_before_the_spike_is_used(tmp_path):
    loads = Loads(158)
    done = went_back(loads, Recoveries(Files(tmp_path)), spike(162, first=160))
    assert loads.asked == ["before-156", "before-160"]
    assert (done.back_to, done.start, done.stop) == (158, 1580, 1660)


def test_a_missing_state_to_go_back_to_is_an_error_with_advice(tmp_path):
    with pytest.raises(SpikeNotRecovered, match=r"nothing to go back to .*lower rollback_every"):
        went_back(Loads(170), Recoveries(Files(tmp_path)), spike(162, first=160))
    assert not (tmp_path / RECOVERIES_FILE_NAME).exists()


def test_a_spike_in_the_first_steps_skips_from_the_first_on(tmp_path):
    done = went_back(Loads(0), Recoveries(Files(tmp_path)), spike(3, first=2))
    assert (done.back_to, done.start) == (0, 0)


def test_the_newest_state_before_a_step_is_chosen(tmp_path):
    state = new_state()
    with (
        Store(tmp_path) as store,
        SavingPolicy(store, PolicyConfig(rollback_every=2, best_k=0)) as policy,
    ):
        for step in range(1, 9):
            train(state, 1)
            state.step = step
            policy.after_step(step, state, {"loss": 1.0})
        assert policy.resume(state, "before-7").saved.step == 6
        assert policy.resume(state, "before-6").saved.step == 4
        assert policy.resume(state).saved.step == 4  # later states are given up
        with pytest.raises(NothingSaved, match=r"no state from before step 2; saved steps: 2, 4"):
            policy.resume(state, "before-2")


def test_the_stream_leaves_out_skipped_positions_and_counts_windows_without_them():
    stream = Stream(Samples(list(range(100))), batch_size=4, microbatch=4, shuffle=False)
    assert stream.after(0, windows=3) == 12
    stream.skip(4, 10)
    assert [stream.after(0, windows=windows) for windows in (1, 2, 3)] == [4, 14, 18]
    assert stream.samples_between(0, 12) == [0, 1, 2, 3, 10, 11]
    stream.skip(8, 14)
    assert stream.skipped == ((4, 14),)
    with pytest.raises(ValueError, match="can't skip positions 5 to 5"):
        stream.skip(5, 5)


def test_recoveries_are_readable_json(tmp_path):
    Recoveries(Files(tmp_path)).add(recovery(100), write=True)
    assert json.loads((tmp_path / RECOVERIES_FILE_NAME).read_text())[0]["spike"] == 100
