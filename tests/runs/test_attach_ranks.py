"""A script with `saving` on two ranks is killed and resumed, and stays equal to the bit.

python -m pytest tests/runs/test_attach_ranks.py
"""

import os
import signal
import subprocess
import sys

import pytest
import torch
from attached_scripts import PLAIN, attached, on_ranks
from tree import ROOT
from warm_python import warm_python

from curry_train.gates.fixtures import run_on_ranks
from curry_train.runs import RunError, SavedRun, saving

STEPS = 4  # of an epoch: 11 samples of each rank, 3 in a batch
EPOCHS = 3
RANKS = (0, 1)


def start(folder, script, *words, at=(0, 0), python=None):
    """Start both ranks; `at` is the optimizer step in which each is killed, 0 for never."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    (folder / "meet").unlink(missing_ok=True)
    paths = os.pathsep.join([str(ROOT / "template"), str(ROOT / "tests/runs")])
    environment = os.environ | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "MEET": (folder / "meet").as_uri(),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(
            [
                python or warm_python(),
                str(ROOT / "tests/runs/attached_scripts.py"),
                str(at[rank]),
                "script.py",
                *map(str, words),
            ],
            cwd=folder,
            env=environment | {"RANK": str(rank)},
            **pipes,
        )
        for rank in RANKS
    ]


def ended(processes, timeout=60):
    """Return status, losses and standard error of each rank.

    When one rank has died the other is killed, as torchrun does; a rank that ended by SIGTERM
    has not died, and the other may still be saving.
    """
    try:
        for each in processes:
            if each.wait(timeout) not in (0, 128 + signal.SIGTERM):
                break
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
    found = []
    for each in processes:
        out, error = each.communicate(timeout=timeout)
        found.append(
            (each.returncode, [line for line in out.splitlines() if line.startswith("loss")], error)
        )
    return found


def flip_a_bit(run_folder, rank):
    """Flip a bit in one rank's file of the newest checkpoint, and return its step."""
    newest = SavedRun(run_folder).latest()
    path = next((run_folder / newest.folder).glob(f"__{rank}_*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return newest.step


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The script without `saving`, with a worker that draws from its rank's generator."""
    folder = tmp_path_factory.mktemp("plain")
    found = ended(start(folder, on_ranks(PLAIN), 1))
    assert [(status, len(losses)) for status, losses, _ in found] == [(0, EPOCHS * STEPS)] * 2, (
        found
    )
    assert found[0][1] != found[1][1]
    weights = torch.load(folder / "weights-0.pt")
    return [losses for _, losses, _ in found], weights


def test_two_ranks_killed_damaged_and_resumed_are_the_straight_run_to_the_bit(plain, tmp_path):
    losses, weights = plain
    script = on_ranks(attached()).replace("    run.measured(", "    if rank == 0: run.measured(")
    found = ended(start(tmp_path, script, 1, at=(9, 9)))  # in the third epoch
    assert [(status, first) for status, first, _ in found] == [
        (-signal.SIGKILL, each[:8]) for each in losses
    ], found
    assert flip_a_bit(tmp_path / "run", rank=1) == 8
    found = ended(start(tmp_path, script, 1))  # from 6, in the middle of the second
    assert [(status, rest) for status, rest, _ in found] == [(0, each[6:]) for each in losses], (
        found
    )
    assert "rollback/step-00000008.dcp" in found[0][2]
    for rank in RANKS:
        ours = torch.load(tmp_path / f"weights-{rank}.pt")
        differing = [name for name in weights if not torch.equal(weights[name], ours[name])]
        assert [name for name in differing if rank == 0 or "running" not in name] == []
    run = SavedRun(tmp_path / "run")
    assert run.latest().step == EPOCHS * STEPS
    best = {one.step for one in run.committed("best-k")}
    assert best  # one rank measured for both
    assert best <= {4, 8, 12}


def test_a_signal_to_one_rank_stops_both_between_the_same_two_steps(tmp_path):
    """Slurm and torchrun signal every rank, but the ranks receive it in different steps."""
    slow = on_ranks(attached()).replace(
        "        loss.backward()\n",
        "        loss.backward()\n        import time; time.sleep(0.3)\n",
    )
    processes = start(tmp_path, slow, 0, python=sys.executable)  # a signal needs its own process
    assert processes[1].stdout.readline().startswith("loss")
    processes[1].send_signal(signal.SIGTERM)
    found = ended(processes)
    assert [status for status, _, _ in found] == [128 + signal.SIGTERM] * 2, found
    newest = SavedRun(tmp_path / "run").latest()
    assert newest.step == len(found[0][1]) == 1 + len(found[1][1])  # one line was read above
    assert newest.step < EPOCHS * STEPS


def open_below(path):
    try:
        saving(torch.nn.Linear(1, 1), runs=path)
    except (OSError, RunError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_folder_that_can_not_be_is_an_error_on_both_ranks_and_none_waits(tmp_path):
    (tmp_path / "file").touch()
    first, second = run_on_ranks(
        f"{__file__}:open_below", path=str(tmp_path / "file/run"), timeout=60
    )
    assert first.startswith("NotADirectoryError")
    assert "NotADirectoryError" in second
