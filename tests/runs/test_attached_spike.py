"""Roll a DataLoader loop back from a spike; started again it skips the batches.

python -m pytest tests/runs/test_attached_spike.py
"""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from curry_train.runs import read_history, saving

from ..command_runs import read_json
from ..journals import lines_of
from ..library_trainers import weights
from ..rank_calls import run_on_ranks
from ..store_models import regressor

BAD = range(90, 96)  # indices of drawn batches; an epoch has 40
EPOCHS, BATCHES = 3, 40
BACK = {"action": "rollback", "window": 32, "skip_around": 2}


class Planted:
    """A loader whose batches with an index in `bad` have wrong targets."""

    def __init__(self, loader, bad):
        self.loader = loader
        self.bad = bad
        self.epoch = 0
        self.generator = loader.generator

    def __iter__(self):
        for number, (inputs, targets) in enumerate(self.loader, start=BATCHES * self.epoch):
            yield inputs, targets + 50.0 if number in self.bad else targets


def train(folder, *, spike=BACK, microbatches=1, rollback_every=10, rank=0, journal=True, own=None):
    """Train with dropout, shuffled data and a schedule; return the exit status or the end."""
    model = regressor()
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    torch.manual_seed(rank)
    inputs = torch.randn(4 * BATCHES, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    source = Planted(
        DataLoader(data, batch_size=4, shuffle=True, generator=own), BAD if rank == 0 else ()
    )
    kept = {"journal": journal, "rollback_every": rollback_every}
    try:
        with saving(model, optimizer, scheduler, runs=folder, spike=spike, **kept) as run:
            for source.epoch in run.epochs(range(EPOCHS)):
                for number, (x, y) in enumerate(run.batches(source), start=1):
                    loss = (model(x) - y).square().mean()
                    loss.backward()
                    if number % microbatches == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                        run.step(loss=loss)
                scheduler.step()
    except SystemExit as stop:
        return stop.code
    return run.steps, scheduler.get_last_lr(), weights(model).tolist()


def started_again(folder, **how):
    """Start the training until it finishes; return the earlier exit statuses, and the end."""
    statuses = []
    while not isinstance(ended := train(folder, **how), tuple):
        statuses.append(ended)
        assert len(statuses) < 9
    return statuses, ended


def events(folder):
    return [line for line in lines_of(folder) if line["kind"] not in {"step", "save", "prune"}]


def test_a_recovered_run_is_bit_equal_to_one_that_never_saw_the_batches():
    """Go back from the third epoch into the second, with a save every 18 steps of two batches."""
    how = {"microbatches": 2, "rollback_every": 18, "journal": False}
    statuses, ended = started_again("spiked", **how)
    assert statuses == [75]
    (recovery,) = read_json("spiked/recoveries.json")
    assert recovery["start"] < BAD[0]
    assert recovery["stop"] > BAD[2]
    Path("never").mkdir()
    shutil.copy("spiked/recoveries.json", "never")
    assert ended == train("never", **how)
    assert ended != train("trained-through", **how | {"spike": None})


def test_the_journal_and_the_terminal_have_spike_rollback_and_skip(tmp_path, caplog):
    started_again(tmp_path / "run")
    assert re.search(
        r"spike: loss [\d.]+ at step 93, with .* as the limit, too high since step 91", caplog.text
    )
    assert (
        "Rolled back to rollback/step-00000080.dcp, without the data at positions 88 to 94 "
        "(attempt 1" in caplog.text
    )
    assert "start again to go on" in caplog.text
    recorded = events(tmp_path / "run")
    kinds = ["start", "spike", "rollback", "skip", "stop", "resume", "stop"]
    assert [event["kind"] for event in recorded] == kinds
    spike, rollback, skip = recorded[1:4]
    assert (
        read_history(f"{tmp_path}/run@1").steps.step[-1] == 93
    )  # the step itself is recorded before
    assert (spike["step"], spike["first"]) == (93, 91)
    assert (rollback["step"], rollback["from_step"]) == (80, 93)
    assert (skip["start"], skip["stop"]) == (88, 95)
    assert [event["reason"] for event in recorded if event["kind"] == "stop"] == ["spike", "closed"]


def test_a_data_order_drawn_from_the_models_generator_gets_a_warning(caplog):
    train("global", rollback_every=35)
    assert "epoch 2 will be shuffled again" in caplog.text
    assert " of its own, DataLoader(..., generator=torch.Generator())\n" in caplog.text
    caplog.clear()
    train("own", rollback_every=35, own=torch.Generator())
    assert "Rolled back to" in caplog.text
    assert "shuffled again" not in caplog.text


def test_a_signal_in_the_step_of_a_spike_has_its_own_status():
    model = nn.Linear(2, 1)

    def loop():
        with saving(model, runs="run", spike=BACK, rollback_every=1) as run:
            for row in run.batches(torch.ones(5, 2)):
                run.step(loss=float("nan") if run.steps == 2 else model(row).sum())
                if run.steps == 3:
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        loop()
    assert ended.value.code == 128 + signal.SIGTERM


def test_what_it_can_not_use_is_refused():
    with pytest.raises(ValueError, match=r"^spike\.acton is no key"):
        saving(nn.Linear(2, 1), runs="run", spike={"acton": "warn"})
    run = saving(nn.Linear(2, 1), runs="run", spike=BACK)
    with pytest.raises(ValueError, match=re.escape("take them from run.batches(loader)")):
        run.step(loss=1.0)


def on_a_rank(folder):
    """Train with bad batches on the first rank alone, with which the others have to go back.

    The second rank gives a folder of its own, as where it starts in another one.
    """
    from pathlib import Path

    rank = torch.distributed.get_rank()
    return started_again(Path(folder, "elsewhere" * rank), rank=rank)


def test_two_ranks_go_back_together_and_one_writes_the_journal():
    first, second = run_on_ranks(f"{__file__}:on_a_rank", folder="run")
    assert first == second
    assert first[0] == [75]
    kinds = [event["kind"] for event in events("run")]
    assert kinds == ["start", "spike", "rollback", "skip", "stop", "resume", "stop"]
