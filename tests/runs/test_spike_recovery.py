"""Record recoveries from spikes on disk, and recover in any training loop.

python -m pytest tests/runs/test_spike_recovery.py
"""

import pytest
from store_models import new_state, train

from curry_train.runs import Files, Recoveries, RunError, SavingPolicy, Store
from curry_train.runs.policy_config import PolicyConfig
from curry_train.runs.random_state import DataPosition
from curry_train.runs.resume import NothingSaved
from curry_train.runs.spike import RECOVERIES_FILE_NAME, AttachedWatch, Spike, SpikeNotRecovered


@pytest.mark.parametrize(
    "text", ["", "{}x", "[3]", '[{"spike": 1}]', '[{"spike": -1}]', '[{"spike": "1"}]', "\0\xff"]
)
def test_an_invalid_file_of_recoveries_is_an_error_with_its_purpose(tmp_path, text):
    (tmp_path / RECOVERIES_FILE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match="lists the samples that are skipped, and can't be read"):
        Recoveries(Files(tmp_path))


def test_a_missing_state_to_go_back_to_is_an_error_with_advice(tmp_path):
    def load(what):
        raise NothingSaved(f"no state {what}")

    watch = AttachedWatch({"action": "rollback"}, DataPosition())
    watch.begin(Files(tmp_path))
    with pytest.raises(SpikeNotRecovered, match=r"nothing to go back to.*lower rollback_every"):
        watch.go_back(Spike(162, 160, 9.0, 2.0, 3.0), new_state(), load)
    assert not (tmp_path / RECOVERIES_FILE_NAME).exists()


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
