"""The project learns, and neither recompute nor a resume changes a loss."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).resolve().parents[1]
WORDS = (
    "device=cpu",
    "steps=6",
    "batch_size=4",
    "microbatch=2",
    "data.length=16",
    "evaluate={every: 3, samples: 4}",
    "checkpoint.rollback_every=2",
)

# Trains in a process of its own, and kills it with the optimizer's fifth step just done.
KILLED = """
import os, signal, sys
import train
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
def kill(*_):
    steps.append(1)
    if len(steps) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_post_hook(kill)
train.main(sys.argv[1:])
"""


def run(folder, *words, resume=None):
    """Train, and return the exit status and the losses of all attempts, by step."""
    arguments = [*WORDS, f"runs={folder}", *words]
    status = train.main([*arguments, *(["--resume", resume] if resume else [])])
    return status, losses_in(folder)


def losses_in(folder):
    (journal,) = Path(folder).glob("*/journal.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    status, losses = run(tmp_path_factory.mktemp("unbroken"))
    assert status == 0
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    return losses


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_loss_falls(tmp_path):
    _, losses = run(tmp_path, "steps=30", "evaluate.every=null")
    first = sum(losses[step] for step in (1, 2, 3)) / 3
    last = sum(losses[step] for step in (28, 29, 30)) / 3
    assert last < first - 1


@pytest.mark.parametrize("strategy", ["full", "sac"])
def test_recompute_keeps_every_loss_to_the_bit(tmp_path, unbroken, strategy):
    assert run(tmp_path, f"recompute.strategy={strategy}") == (0, unbroken)


def test_sigterm_ends_the_step_and_a_resume_goes_on_to_the_bit(tmp_path, unbroken, monkeypatch):
    done = []
    train_window = train.train_window

    def interrupted(*arguments, **options):
        done.append(train_window(*arguments, **options))
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return done[-1]

    monkeypatch.setattr(train, "train_window", interrupted)
    status, losses = run(tmp_path)
    assert (status, sorted(losses)) == (128 + signal.SIGTERM, [1, 2, 3])
    assert run(tmp_path, resume="latest") == (0, unbroken)


def test_a_killed_run_goes_on_to_the_bit(tmp_path, unbroken):
    command = [sys.executable, "-c", KILLED, *WORDS, f"runs={tmp_path}"]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert sorted(losses_in(tmp_path)) == [1, 2, 3, 4]
    assert run(tmp_path, resume="latest") == (0, unbroken)


def test_a_spike_is_rolled_back_without_its_samples(tmp_path, monkeypatch):
    seen = []
    summed_loss = train.summed_loss

    def poisoned(model, batch):
        seen.append(len(batch["tokens"]))
        # Two microbatches are a step: this is the fifth.
        factor = float("nan") if len(seen) == 9 else 1.0
        return factor * summed_loss(model, batch)

    monkeypatch.setattr(train, "summed_loss", poisoned)
    words = ("spike={action: rollback, skip_around: 0, patience: 1}", "evaluate.every=null")
    status, losses = run(tmp_path, *words)
    assert (status, sorted(losses)) == (0, [1, 2, 3, 4, 5, 6])
    (recoveries,) = tmp_path.glob("*/recoveries.json")
    (recovery,) = json.loads(recoveries.read_text())
    assert (recovery["back_to"], recovery["start"], recovery["stop"]) == (4, 16, 20)


def test_a_wrong_word_is_named(capsys):
    assert train.main(["stpes=3"]) == 2
    assert "did you mean 'steps'?" in capsys.readouterr().err
    assert train.main(["data.source=nothing:here"]) == 2
    assert "No module named 'nothing'" in capsys.readouterr().err
