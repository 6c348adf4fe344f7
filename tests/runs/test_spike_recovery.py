"""Record recoveries from spikes on disk, and recover in any training loop.

python -m pytest tests/runs/test_spike_recovery.py
"""

import pytest
from store_models import new_state

from curry_train.runs import Files, RunError
from curry_train.runs.random_state import DataPosition
from curry_train.runs.resume import NothingSaved
from curry_train.runs.spike import (
    RECOVERIES_FILE_NAME,
    AttachedWatch,
    Spike,
    SpikeNotRecovered,
    read_recoveries,
)


@pytest.mark.parametrize("text", ["", "{}x", "[3]", '[{"spike": 1}]', '[{"spike": "1"}]', "\0\xff"])
def test_an_invalid_file_of_recoveries_is_an_error_with_its_purpose(tmp_path, text):
    (tmp_path / RECOVERIES_FILE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match="lists the samples that are skipped, and can't be read"):
        read_recoveries(Files(tmp_path))


def test_a_missing_state_to_go_back_to_is_an_error_with_advice(tmp_path):
    def load(what):
        raise NothingSaved(f"no state {what}")

    watch = AttachedWatch({"action": "rollback"}, DataPosition())
    watch.begin(Files(tmp_path))
    with pytest.raises(SpikeNotRecovered, match=r"nothing to go back to.*lower rollback_every"):
        watch.go_back(Spike(162, 160, 9.0, 2.0, 3.0), new_state(), load)
    assert not (tmp_path / RECOVERIES_FILE_NAME).exists()
