"""Symptoms of the skill `loss-spike`: reproduced, cured, and not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_loss_spike.py
"""

import pytest
from symptoms import rows_of, rows_with_a_test, symptom
from test_spike_watch import BAD, events_of, trained

import spike_runs
from curry_train.runs import SpikeNotRecovered

FOREVER = (BAD[0], 400)
KEPT = "checkpoint.retention.rollback_keep=12"


def test_every_row_has_a_test():
    assert sorted(rows_with_a_test("loss_spike")) == sorted(rows_of("loss-spike"))


@symptom("it came back after 3 rollbacks")
def test_skipping_more_data_does_not_help_if_the_data_is_not_the_cause(tmp_path):
    for attempts in (2, 4):
        with pytest.raises(SpikeNotRecovered, match=f"came back after {attempts} rollbacks"):
            trained(tmp_path / str(attempts), f"spike.attempts={attempts}", KEPT, steps=FOREVER)
    where = tmp_path / "2" / "run-001"
    assert [line["number"] for line in events_of(where, "rollback")] == [1, 2]
    sound = trained(
        tmp_path / "2",
        KEPT,
        "optimizer.learning_rate=5e-4",
        resume="run-001@before-30",
        planted=False,
    )
    assert sound.report.finished


@symptom("there is nothing to go back to")
def test_a_spike_before_the_first_save_needs_an_earlier_save(tmp_path):
    late = "checkpoint={rollback_every: 100}"
    for again in ("first", "anew"):
        with pytest.raises(SpikeNotRecovered, match="nothing to go back to"):
            trained(tmp_path / again, late)
    assert trained(tmp_path / "earlier", "checkpoint={rollback_every: 10}").report.finished


@symptom("alarms in sound training")
def test_one_high_loss_of_small_batches_is_no_spike_with_patience(tmp_path):
    trainings = map(spike_runs.small_training, range(40))
    noisy = next(losses for losses in trainings if spike_runs.first_alarm(losses, patience=1))
    assert spike_runs.first_alarm(noisy, patience=3) is None
    assert spike_runs.first_alarm(noisy, patience=1, threshold=40.0) is None
    assert (
        spike_runs.first_alarm([*noisy, *[1e4] * 3], patience=3) is not None
    )  # a real spike is still found
    assert (
        events_of(trained(tmp_path, "spike.action=none").folder, "spike") == []
    )  # action none finds no spike at all
