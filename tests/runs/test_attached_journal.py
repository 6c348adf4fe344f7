"""The journal of a user's own loop: shown, drawn, and compared bit by bit.

python -m pytest tests/runs/test_attached_journal.py
"""

import gc

import pytest
import torch
from torch import nn

from curry_train.cli.runs_diff import difference
from curry_train.runs import read_history, saving

from ..journals import column
from ..store_models import linear_training, regressor


class Interrupted(BaseException):
    """Ends a loop within its step."""


def train(folder, *, steps=12, until=None):
    """Run a user's loop, which is interrupted after a step."""
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    data = torch.randn(steps, 4)
    retention = {"rollback_keep": 2}
    kept = {"rollback_every": 3, "recovery_every": None, "best_k": 0, "retention": retention}
    with saving(model, optimizer, scheduler, runs=folder, journal=True, **kept) as run:
        for row in run.batches(data):
            loss = model(row).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.step(loss=loss)
            if run.steps == until:
                raise Interrupted("within a step")
        run.measured(dev_loss=0.5)


def test_the_journal_shows_a_resumed_run_equal_to_an_uninterrupted_one(tmp_path):
    train(tmp_path / "straight")
    with pytest.raises(Interrupted):
        train(tmp_path / "ended", until=8)
    train(tmp_path / "ended")
    straight, ended = (read_history(tmp_path / name) for name in ("straight", "ended"))
    found = difference(straight, ended)
    assert found["losses"]["first"] is None
    assert found["losses"]["num_common"] == 12
    assert len(ended.attempts) == 2
    folder = tmp_path / "ended"
    assert column(folder, "resume", "step") == [6]
    assert column(folder, "stop", "reason") == ["Interrupted: within a step", "closed"]
    assert column(folder, "save", "step") == [3, 6, 9, 12]
    assert column(folder, "prune", "of_step") == [3, 6]
    assert column(folder, "eval", "value") == [0.5]
    assert column(folder, "step", "learning_rate") == pytest.approx(
        [0.1 * 0.5 ** ((step - 1) // 4) for step in column(folder, "step", "step")]
    )


def test_the_learning_rate_is_right_if_the_schedule_steps_after_an_epoch(tmp_path):
    model, optimizer = linear_training()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with saving(model, optimizer, scheduler, runs=tmp_path / "run", journal=True) as run:
        for _ in run.epochs(range(2)):
            for row in run.batches(torch.ones(2, 2)):
                optimizer.step()
                run.step(loss=model(row).sum())
            scheduler.step()
    assert column(tmp_path / "run", "step", "learning_rate") == [0.1, 0.1, 0.05, 0.05]


@pytest.mark.parametrize("option", [{"journal": True}, {"spike": {"action": "warn"}}])
def test_a_journal_and_a_watch_need_the_losses(tmp_path, option):
    (name,) = option
    with (
        pytest.raises(
            ValueError,
            match=rf"needs the loss of each step: call run.step\(loss=loss\), or leave {name} out",
        ),
        saving(nn.Linear(2, 1), runs=tmp_path, **option) as run,
    ):
        run.step()


def test_the_journal_is_closed_when_the_last_save_fails(tmp_path, monkeypatch):
    run = saving(*linear_training(), runs=tmp_path, journal=True)
    run.step(loss=1.0)
    monkeypatch.setattr(run.policy, "save_now", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.close()
    del run
    gc.collect()  # an open file would warn, which is an error here
