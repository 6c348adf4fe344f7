"""A loop over data that resume from one integer, rolled back and ended in one process.

python -m pytest tests/runs/test_attached_stream.py
"""

import copy
import os
import signal

import pytest
import torch
from torch import nn

from curry_train.primitives import NonFiniteWindow
from curry_train.runs import saving

from ..journals import lines_of
from ..store_models import equal, linear_training, regressor
from ..toy_steps import drawn

STEPS = 60
BACK = {"action": "rollback", "window": 16, "skip_around": 2}


class Rows:
    """A stream with one row per position, and the methods that `saving` needs."""

    def __init__(self):
        self.position = 0
        self.skipped = set()

    def after(self, position, *, windows):
        for _ in range(windows):
            position = self._here(position) + 1
        return position

    def skip(self, start, stop):
        self.skipped |= set(range(start, stop))

    def take(self):
        place = self._here(self.position)
        self.position = place + 1
        row = drawn(8, 4, seed=place)
        return row, row.sum(1, keepdim=True)

    def _here(self, position):
        while position in self.skipped:
            position += 1
        return position


def train(folder, *, at_step=None, loss_at=None, attach=saving, **options):
    """Train a user's loop with dropout; return the run, its weights and its losses."""
    model = regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = Rows()
    options = {"spike": BACK, "rollback_every": 10, "journal": True, **options}
    losses = []
    with attach(model, optimizer, runs=folder, stream=stream, **options) as run:
        # A later call may train on.
        while run.continues(until=1) or run.continues(until=STEPS):
            inputs, targets = stream.take()
            loss = (model(inputs) - targets).square().mean()
            if loss_at == run.steps + 1:
                loss_at = None
                run.not_finite(NonFiniteWindow("planted"))
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.step(loss=loss)
            if at_step is not None:
                at_step(run)
    return run, copy.deepcopy(model.state_dict()), losses


def test_a_step_that_is_not_finite_is_rolled_back_at_once():
    run, _, _ = train("run", loss_at=25)
    assert run.steps == STEPS
    spike, rollback = (line for line in lines_of("run") if line["kind"] in ("spike", "rollback"))
    assert (spike["step"], spike["reason"], spike["loss"]) == (25, "planted", None)
    assert rollback["step"] == 20
    with pytest.raises(NonFiniteWindow, match="planted"):
        train("warned", loss_at=25, spike={"action": "warn"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_by_a_signal_resumes_bit_equal(number):
    _, weights, losses = train("straight")

    def send(run):
        if run.steps == 7:
            os.kill(os.getpid(), number)

    def drawing(*arguments, **options):
        run = saving(*arguments, **options)
        torch.rand(5)
        return run

    handler = signal.getsignal(number)
    run, _, first = train("ended", at_step=send)
    assert (run.steps, run.ended_by, run.exit_status) == (7, number.name, 128 + number)
    assert signal.getsignal(number) == handler
    # Random numbers that are drawn before the first step do not count.
    run, resumed, rest = train("ended", attach=drawing)
    assert (run.ended_by, run.exit_status) == ("steps", 0)
    assert first + rest == losses
    assert equal(weights, resumed)


def test_settings_of_this_start_replace_saved_ones_only_on_request():
    def started(rate, **options):
        model, optimizer = linear_training(rate)
        with saving(model, optimizer, runs="run", stream=Rows(), **options) as run:
            run.step(loss=1.0)
            return optimizer.param_groups[0]["lr"]

    assert started(0.1) == 0.1
    assert started(0.5) == 0.1
    assert started(0.5, keep_settings=True) == 0.5


def test_calls_for_the_other_kind_of_data_are_refused():
    with saving(nn.Linear(2, 1), runs="stream", stream=Rows()) as run:
        with pytest.raises(ValueError, match=r"run\.batches is for a DataLoader"):
            next(run.batches([1]))
        with pytest.raises(ValueError, match=r"run\.epochs is for a DataLoader"):
            next(run.epochs([1]))
    with saving(nn.Linear(2, 1), runs="loader") as run:
        assert run.continues(until=3)
        with pytest.raises(ValueError, match=r"call saving\(\.\.\., stream=stream\)"):
            run.step()


def test_a_new_run_from_the_best_parameters_takes_batches(tmp_path):
    """Start from best parameters, which have no random state to restore."""
    by_loss = {"best_k_metric": "loss"}
    with saving(nn.Linear(2, 1), runs=tmp_path / "first", **by_loss) as run:
        for row in run.batches(torch.ones(3, 2)):
            run.step(loss=float(row.sum()) - run.steps)
    best = f"{tmp_path}/first@best"
    with saving(nn.Linear(2, 1), runs=tmp_path / "second", resume=best, **by_loss) as run:
        for _ in run.batches(torch.ones(3, 2)):
            run.step(loss=1.0)
        assert run.steps == 3
