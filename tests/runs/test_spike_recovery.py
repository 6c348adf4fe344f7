"""Record recoveries from spikes on disk, and recover in any training loop.

python -m pytest tests/runs/test_spike_recovery.py
"""

import pytest
from store_models import new_state, train

from curry_train.runs import Files, Recoveries, RunError, SavingPolicy, Store
from curry_train.runs.policy_config import PolicyConfig, SpikeConfig
from curry_train.runs.resume import NothingSaved
from curry_train.runs.spike import RECOVERIES_FILE_NAME, Recovery, Spike, SpikeNotRecovered, recover


def spike(step, first=None):
    return Spike(step, first or step, 9.0, 2.0, 3.0)


def recovery(step, *, attempt=1, **facts):
    return Recovery(step, back_to=step - 10, start=0, stop=1, attempt=attempt, **facts)


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
