"""A short torture of the checkpoint store finds nothing wrong, and finds each planted fault.

    python -m pytest tests/benchmarks/test_torture.py

`make torture` runs the long one; its record is evidence/checkpoint_torture.json.
"""

import json
import os
import subprocess

import pytest
from tree import ROOT
from warm_python import warm_python

from torture import wrongs

# A new command of `runs` is listed here if it reads no checkpoint, and otherwise in
# torture_hostile.COMMANDS, which tries it on hostile ones.
OTHER_COMMANDS = {"estimate", "locate", "plot", "record", "resume-check", "spike-check"}
# It loads by `saving`, and `tests/runs/test_box.py` tries forged boxes.
OTHER_COMMANDS |= {"replay"}


def run(*words):
    """Run a module in its own process with one thread, because it forks."""
    paths = os.pathsep.join(
        [str(ROOT / folder) for folder in ("template", "benchmarks", "tests/runs")]
    )
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [warm_python(), "-m", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, cwd=ROOT
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_kills_at_changes_and_of_one_and_of_two_ranks():
    only = ("kills.one_rank", "kills.two_ranks", "kills.at_each_change")
    status, found = run("torture", "--kills", "4", "--every", "13", "--only", *only, "--json", "-")
    assert (wrongs(found), status) == ([], 0)
    assert found["kills"]["one_rank"]["kills"] >= 2
    assert found["kills"]["two_ranks"]["kills"] >= 1
    assert found["kills"]["at_each_change"]["kills"] >= 5


@pytest.mark.long
def test_damage_and_hostile_files():
    only = ("flips", "swaps", "hostile")
    status, found = run("torture", "--flips", "32", "--every", "43", "--only", *only, "--json", "-")
    assert (wrongs(found), status) == ([], 0)
    assert found["flips"]["flips"] == 32
    assert found["flips"]["files"] == 16
    assert found["flips"]["each_file"] == 2
    assert found["swaps"]["swaps"] >= 12
    assert found["hostile"]["shapes"] >= 10


FAULTS = {
    "generators_stay_as_they_are": "was not as the straight run at step",
    "renamed_before_it_is_whole": "is half there",
    "the_older_goes_before_the_newer_is_whole": "was committed",
    "retention_deletes_the_newest": "was committed",
    "the_optimizer_does_not_wait": "is not what the straight run was at its step",
    "hashes_are_not_compared": "it was taken for whole",
    "anything_is_unpickled": "the code in it was run",
    "links_are_followed": "was opened",
}


@pytest.fixture(scope="module")
def planted():
    return run("torture_planted", *FAULTS)[1]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(planted, fault):
    assert any(FAULTS[fault] in wrong for wrong in planted[fault]), planted[fault]


def test_every_command_that_reads_a_checkpoint_is_tried():
    from curry_train.cli.runs import runs_command
    from torture_hostile import COMMANDS

    assert set(runs_command.list_commands(None)) == {*COMMANDS, *OTHER_COMMANDS}
