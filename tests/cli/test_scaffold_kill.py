"""Kills and signals in the middle of a write: a new project is absent or whole, and an `add` run again completes."""

import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scaffold_case import make_bundle, scaffold, tree, write

from scaffolding.write import sweep

KILLS = 14


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose copy takes long enough to be hit."""
    root = make_bundle(tmp_path / "bundle")
    for index in range(1500):
        write(root / f"template/curry_train/core/tables/{index:04}.json", f"[{index}]\n" * 200)
    return root


def has_more_files(folder: Path, *, than: int) -> bool:
    return sum(path.is_file() for path in folder.rglob("*")) > than


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*.curry-train-*") if path.name.startswith(".")]


def send(
    number: int, bundle: Path, *arguments: str, cwd: Path, when: Callable[[], bool], delay: float
) -> subprocess.Popen[bytes]:
    """Start the command and send it `number` a moment after `when` holds."""
    command = [sys.executable, str(bundle / "scripts/scaffold.py"), *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not when():
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(number)
    process.wait()
    return process


def test_new_that_is_killed_leaves_nothing_or_everything(bundle: Path, tmp_path: Path) -> None:
    assert scaffold(bundle, "new", "reference", "--name", "run", cwd=tmp_path).returncode == 0
    whole, place, hits = tree(tmp_path / "reference"), tmp_path / "place", 0
    place.mkdir()
    chance = random.Random(0)
    for kill in range(KILLS):
        begun = (lambda: True) if kill % 4 == 0 else (lambda: bool(leftovers(place)))
        delay = chance.uniform(0, 0.4) if kill % 4 == 0 else chance.uniform(0, 0.04)
        send(signal.SIGKILL, bundle, "new", "run", cwd=place, when=begun, delay=delay)
        hits += bool(leftovers(place))
        if (place / "run").exists():
            assert tree(place / "run") == whole
            (place / "run").rename(tmp_path / f"whole-{kill}")
    assert hits >= 3, "no kill came in the middle of the write, so this showed nothing"
    assert scaffold(bundle, "new", "run", cwd=place).returncode == 0
    assert [path.name for path in place.iterdir()] == ["run"]


def test_add_that_is_killed_is_completed_by_running_it_again(bundle: Path, tmp_path: Path) -> None:
    for name in ("reference", "place"):
        write(tmp_path / name / "setup.py", "")
    arguments = ("add", "grad-accum", "--into", "package")
    assert scaffold(bundle, *arguments, cwd=tmp_path / "reference").returncode == 0
    whole, place, hits = tree(tmp_path / "reference"), tmp_path / "place", 0
    chance = random.Random(1)
    for _ in range(5):
        begun = functools.partial(has_more_files, place, than=len(tree(place)))
        send(
            signal.SIGKILL,
            bundle,
            *arguments,
            cwd=place,
            when=begun,
            delay=chance.uniform(0, 0.05),
        )
        there = {
            path: content for path, content in tree(place).items() if ".curry-train-" not in path
        }
        assert there.items() <= whole.items()
        hits += "curry-train.lock" not in there and len(there) > 1
    assert hits >= 2, "no kill came in the middle of the write, so this showed nothing"
    assert scaffold(bundle, *arguments, cwd=place).returncode == 0
    assert tree(place) == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_new_that_is_asked_to_stop_cleans_up(
    bundle: Path, tmp_path: Path, number: signal.Signals
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    stopped = send(
        number, bundle, "new", "run", cwd=place, when=lambda: bool(leftovers(place)), delay=0.005
    )
    assert stopped.returncode == 128 + number
    assert list(place.iterdir()) == []


def test_sweep_spares_a_write_that_is_still_running(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    running = tmp_path / f".run.curry-train-{os.getppid()}"
    running.mkdir()
    write(tmp_path / f".run.curry-train-{ended.pid}/half.py", "")
    write(tmp_path / f".half.py.curry-train-{ended.pid}", "")
    write(tmp_path / "run.curry-train-1", "not ours\n")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [running.name, "run.curry-train-1"]
