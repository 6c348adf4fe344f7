"""Tests of kills at every write: `new`, `add` and `update` leave nothing torn.

Run: `python -m pytest tests/cli/test_scaffold_kill.py`.
"""

import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from scaffold_case import edit, make_bundle, scaffold, tree, write

from curry_train.cli import merge
from curry_train.cli.ownership import Bundle

KILLED = 137
# Every call with which the commands change the disk; Path's methods call these of os.
CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "chmod")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path / "bundle")


def kill_at(change: int, run: Callable[[], object]) -> bool:
    """Run in a process that dies before its `change`-th change of the disk; return whether so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, from Python 3.12
        process = os.fork()
    if process == 0:
        try:
            _die_at(change)
            run()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) == KILLED


def _die_at(change: int) -> None:
    left = change

    def dying(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(KILLED)
            return genuine(*arguments, **options)

        return call

    def write_half(place: Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            place.write_bytes(content[: len(content) // 2])
            os._exit(KILLED)
        genuine_write(place, content)

    genuine_write = merge.write_file
    mock.patch.object(merge, "write_file", write_half).start()
    for name in CHANGES:
        mock.patch.object(os, name, dying(getattr(os, name))).start()


def every_kill(run: Callable[[], object], check: Callable[[int], None], *, stride: int = 1) -> int:
    """Kill `run` at each of its changes and check what is left; return how many there were.

    With a stride only each such change is tried.
    """
    change = 0
    while kill_at(change, run):
        check(change)
        change += stride
        assert change < 2000
    return change


# A quarter of the changes, all of which come once in `make long`.
ANY_OR_EACH = pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.long)])


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if ".curry-train" in path.name]


def test_new_that_is_killed_at_any_write_leaves_nothing_or_everything(
    bundle: Bundle, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    scaffold(bundle, "new", "run", cwd=tmp_path)
    whole = tree(tmp_path / "run")
    seen = {"absent": 0, "whole": 0}

    def check(change: int) -> None:
        if (place / "run").exists():
            assert tree(place / "run") == whole
            seen["whole"] += 1
            shutil.rmtree(place / "run")
        else:
            seen["absent"] += 1

    changes = every_kill(lambda: scaffold(bundle, "new", "run", cwd=place), check)
    assert changes > 3 * len(whole)
    assert seen["absent"] >= 2 * len(whole)
    # The last run was not killed; it removed what the kills had left.
    assert tree(place / "run") == whole
    assert [path.name for path in place.iterdir()] == ["run"]


@ANY_OR_EACH
def test_add_that_is_killed_at_any_write_is_completed_by_running_it_again(
    bundle: Bundle, tmp_path: Path, stride: int
) -> None:
    for name in ("reference", "place"):
        write(tmp_path / name / "setup.py", "")
        write(tmp_path / name / "notes.txt", "mine\n")
    arguments = ("add", "sac", "--into", "package")
    scaffold(bundle, *arguments, cwd=tmp_path / "reference")
    whole = tree(tmp_path / "reference")
    place = tmp_path / "place"

    def check(change: int) -> None:
        there = {path: text for path, text in tree(place).items() if ".curry-train" not in path}
        assert there.items() <= whole.items()
        again = scaffold(bundle, *arguments, cwd=place)
        assert again.returncode == 0, again.stderr
        assert tree(place) == whole
        assert not leftovers(place)
        for path in set(whole) - {"setup.py", "notes.txt"}:
            (place / path).unlink()
        shutil.rmtree(place / "package")
        shutil.rmtree(place / "tests")

    changes = every_kill(lambda: scaffold(bundle, *arguments, cwd=place), check, stride=stride)
    assert changes > 3 * 5


@pytest.fixture
def conflicting(bundle: Bundle, tmp_path: Path) -> Path:
    """Make a project with an edit, a merge, a conflict, a removed file and a file to add."""
    write(bundle.project / "gone.txt", "1\n")
    scaffold(bundle, "new", "run", cwd=tmp_path)
    project = tmp_path / "run"
    (bundle.project / "gone.txt").unlink()
    write(bundle.project / "deep/er/fresh.txt", "new\n")
    write(project / ".gitignore", "/mine/\n")
    edit(project / "train.py", "def main():", "def main():\n    print('mine')")
    edit(bundle.project / "train.py", "Train my_project.", "Train my_project, faster.")
    edit(project / "README.md", "Read train.py.", "Read my notes.")
    edit(bundle.project / "README.md", "Read train.py.", "Read config.yaml.")
    return project


@ANY_OR_EACH
def test_update_that_is_killed_at_any_write_ends_like_one_that_was_not(
    bundle: Bundle, conflicting: Path, tmp_path: Path, stride: int
) -> None:
    start = tree(conflicting)
    reference = Path(shutil.copytree(conflicting, tmp_path / "reference"))
    scaffold(bundle, "update", cwd=reference)
    end = tree(reference)
    assert len({path for path in {*start, *end} if start.get(path) != end.get(path)}) == 6
    seen = {"before": 0, "between": 0, "after": 0}

    def check(change: int) -> None:
        left = {
            path: text for path, text in tree(conflicting).items() if ".curry-train" not in path
        }
        # Each file is as before or as after, never torn.
        for path in {*left, *start, *end}:
            assert left.get(path) in (start.get(path), end.get(path)), path
        pending = (conflicting / merge.PENDING_FOLDER).exists()
        state = "after" if left == end else "between"
        seen["before" if left == start else state] += 1
        again = scaffold(bundle, "update", cwd=conflicting)
        assert ("First completed an earlier write" in again.stderr) == pending
        assert tree(conflicting) == end
        assert not leftovers(conflicting)
        shutil.rmtree(conflicting)
        write_tree(conflicting, start)

    changes = every_kill(lambda: scaffold(bundle, "update", cwd=conflicting), check, stride=stride)
    assert changes > 3 * 6
    assert min(seen.values()) >= 1
    assert tree(conflicting) == end


def kill_between(bundle: Bundle, project: Path) -> None:
    """Kill an update when three of its files are written and others are not."""
    start = tree(project)
    genuine = merge._put
    left = 3

    def put(place: Path, content: bytes | None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os._exit(KILLED)
        genuine(place, content)

    with mock.patch.object(merge, "_put", put):
        assert kill_at(10**6, lambda: scaffold(bundle, "update", cwd=project))
    assert (project / merge.PENDING_FOLDER).is_dir()
    left_over = {path: text for path, text in tree(project).items() if ".curry-train" not in path}
    assert (
        len([path for path in {*start, *left_over} if start.get(path) != left_over.get(path)]) == 3
    )


def test_a_killed_update_whose_staged_files_are_torn_is_undone_completely(
    bundle: Bundle, conflicting: Path
) -> None:
    start = tree(conflicting)
    kill_between(bundle, conflicting)
    staged = sorted((conflicting / merge.PENDING_FOLDER).glob("*.after"))
    staged[-1].write_bytes(staged[-1].read_bytes()[:-3])
    assert merge.recover_update(conflicting) == (
        "undid an earlier write that was interrupted and left damaged files"
    )
    assert tree(conflicting) == start
    assert not (conflicting / "deep").exists()


def test_a_torn_copy_that_is_needed_stops_the_recovery_with_advice(
    bundle: Bundle, conflicting: Path
) -> None:
    kill_between(bundle, conflicting)
    for staged in (conflicting / merge.PENDING_FOLDER).glob("*.*"):
        if staged.name != "table.json":
            staged.write_bytes(b"")
    refused = scaffold(bundle, "update", cwd=conflicting)
    assert refused.returncode == 2
    assert "can't be restored" in refused.error
    assert "from version control" in refused.error


def test_a_damaged_table_stops_the_recovery_with_advice(bundle: Bundle, conflicting: Path) -> None:
    kill_between(bundle, conflicting)
    (conflicting / merge.PENDING_FOLDER / "table.json").write_bytes(b"[{")
    refused = scaffold(bundle, "update", cwd=conflicting)
    assert (refused.returncode, ".curry-train.pending is damaged" in refused.error) == (2, True)


def test_an_edit_between_a_kill_and_the_recovery_is_kept(bundle: Bundle, conflicting: Path) -> None:
    kill_between(bundle, conflicting)
    text = (conflicting / "train.py").read_text()
    assert "faster" not in text, "train.py comes late in the plan, so the kill was before it"
    (conflicting / "train.py").write_text(
        text.replace("if __name__", "print('later')\n\nif __name__")
    )
    scaffold(bundle, "update", cwd=conflicting)
    merged = (conflicting / "train.py").read_text()
    assert "faster" in merged
    assert "print('mine')" in merged
    assert "print('later')" in merged


@pytest.mark.parametrize("arguments", [["diff"], ["update", "--dry-run"]])
def test_a_command_that_only_reads_refuses_an_interrupted_write(
    bundle: Bundle, conflicting: Path, arguments: list[str]
) -> None:
    kill_between(bundle, conflicting)
    before = tree(conflicting)
    refused = scaffold(bundle, *arguments, cwd=conflicting)
    assert refused.returncode == 2
    assert "run 'curry-train update' there to finish" in refused.error
    assert tree(conflicting) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["new", "update"])
@pytest.mark.parametrize("writes", [2, 14])
def test_a_command_cleans_up_after_a_signal(
    bundle: Bundle,
    conflicting: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: signal.Signals,
    writes: int,
) -> None:
    """Send the signal while files are staged, or while they are moved into place."""
    genuine = merge.write_file
    count = 0

    def stopped(place: Path, content: bytes) -> None:
        nonlocal count
        count += 1
        if count == min(writes, 6 if name == "new" else writes):
            os.kill(os.getpid(), number)
        genuine(place, content)

    before = tree(tmp_path)
    monkeypatch.setattr(merge, "write_file", stopped)
    arguments = {"new": ["new", "other"], "update": ["update", "run"]}[name]
    done = scaffold(bundle, *arguments, cwd=tmp_path)
    assert done.returncode == 128 + number
    assert tree(tmp_path) == before
    assert not leftovers(tmp_path)


def test_sweep_leaves_a_write_that_is_still_running(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    running = tmp_path / f".run.curry-train-{os.getppid()}"
    running.mkdir()
    write(tmp_path / f".run.curry-train-{ended.pid}/half.py", "")
    write(tmp_path / f".half.py.curry-train-{ended.pid}", "")
    write(tmp_path / "run.curry-train-1", "not ours\n")
    merge.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [running.name, "run.curry-train-1"]


def write_tree(root: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
