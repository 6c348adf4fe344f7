"""The `train` command: words, exit statuses, signals and ranks.

python -m pytest tests/cli/test_train_command.py
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from curry_train.runs.files import create

from ..command_runs import flat, ran, read_json, started, wait_for
from ..journals import column

TINY = "model=tests.training_models:tiny batch_size=4 microbatch=2 evaluate.samples=4 device=cpu"
RANKS = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 -m curry_train train"


def trained(*words, status=0):
    """Return the result of the command for the tiny model."""
    return ran("train", TINY, *words, status=status)


def test_a_run_of_a_file_and_words_prints_its_folder():
    Path("config.yaml").write_text("name: mine\nsteps: 4\n")
    first = trained("--json end.json --seed 3")
    assert first.stderr == ""
    assert first.stdout.endswith(
        "\n4 steps done, saved as runs/mine-001/recovery/step-00000004.dcp\n"
    )
    ended = read_json("end.json")
    assert (ended["step"], ended["ended_by"], ended["run"]) == (4, "steps", "runs/mine-001")
    assert 4 < ended["dev_loss"] < 6
    assert "seed: 3" in Path("runs/mine-001/config.yaml").read_text()
    assert trained("--resume latest").stdout.endswith(
        "\nnothing to do: runs/mine-001 has its 4 steps; increase steps= to go on\n"
    )


def test_a_loss_that_is_not_finite_ends_with_status_1():
    error = flat(trained("optimizer.learning_rate=1e18 clip_norm=null steps=9", status=1).stderr)
    assert "The weights were not changed" in error
    assert "Traceback" not in error


def test_a_state_that_can_not_be_saved_ends_with_its_message_and_status_1(monkeypatch):
    """Report at the end of the run that the background save failed."""

    def full(path):
        if path.suffix == ".distcp":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
        return create(path)

    monkeypatch.setattr("curry_train.runs.format.create", full)
    error = flat(trained("steps=2", status=1).stderr)
    assert "free some space" in error
    assert "Traceback" not in error


def test_missing_tensorboard_is_reported_before_a_run_begins(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused = trained("log.tensorboard=true", status=2)
    message = "log.tensorboard needs the package tensorboard: pip install tensorboard"
    assert message in flat(refused.stderr)
    assert not Path("runs").exists()


def test_a_signal_saves_and_the_run_goes_on():
    journal = Path("runs/run-001/journal.jsonl")

    def stop():
        """Send the signal once the third step is in the journal."""
        wait_for(lambda: journal.is_file() and '"step":3,' in journal.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    long = "steps=100000 log.every=1000"
    lines = trained(long, "--seed 3", status=128 + signal.SIGTERM).stdout.splitlines()[-2:]
    assert lines[0].startswith("stopped by SIGTERM after step ")
    assert lines[1] == f"go on with --resume run-001 {TINY} {long} seed=3"
    step = int(lines[0].split()[5].strip(","))
    assert f"from step {step}\n" in trained(f"seed=3 --resume run-001 steps={step + 2}").stdout
    assert column(journal.parent, "step", "step") == list(range(1, step + 3))


@pytest.mark.timeout(600)
def test_torchrun_trains_and_a_signal_to_one_rank_stops_both():
    process = started(*f"{RANKS} {TINY} steps=100000 parallel=fsdp2 log.every=1000".split())
    journal = Path("runs/run-001/journal.jsonl")
    wait_for(lambda: journal.is_file() and '"step":2,' in journal.read_text())
    ranks = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGTERM)
    out, error = process.communicate(timeout=200)
    assert "stopped by SIGTERM after step" in out, error
    assert list(Path("runs/run-001/recovery").glob("step-*.dcp"))
    assert process.returncode != 0


def test_a_resume_says_which_settings_are_no_longer_those_of_the_first_start():
    trained("steps=1 optimizer.learning_rate=2e-3")
    resumed = trained("steps=2 --resume latest")
    assert "optimizer.learning_rate: 0.002 -> 0.003" in flat(resumed.output)
