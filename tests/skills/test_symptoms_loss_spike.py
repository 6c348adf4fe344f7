"""Symptoms of the skill `loss-spike`: reproduced, cured, and not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_loss_spike.py
"""

import math

import pytest
import torch
from symptoms import symptom
from test_spike_watch import events_of, trained

import spike_runs
from curry_train.runs import SpikeNotRecovered, saving


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


@symptom("the run ended with status 0, and the weights that it saved are NaN")
def test_nan_is_never_saved_and_a_watched_run_ends_with_status_75(tmp_path):
    def run_night(folder, **options):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with saving(model, optimizer, runs=folder, rollback_every=1, **options) as run:
            for number, inputs in enumerate(run.batches(torch.randn(6, 8, 4))):
                loss = model(inputs).square().mean() * (math.nan if number == 3 else 1.0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
        return model

    unwatched = run_night(tmp_path / "unwatched")  # ends without an error
    assert unwatched.weight.isnan().any()
    assert torch.nan_to_num(unwatched.weight).eq(0).all()  # the wrong fix hides it
    with pytest.raises(SystemExit) as ended:
        run_night(tmp_path / "watched", spike={"action": "rollback"})
    assert ended.value.code == 75
    for folder in ("unwatched", "watched"):
        saved = sorted(path.name for path in tmp_path.glob(f"{folder}/**/rollback/step-*"))
        assert saved[-1] == "step-00000003.dcp"
