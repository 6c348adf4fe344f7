"""Tests of `add`: where it copies a technique, which files it leaves, and the copied test.

Run: `python -m pytest tests/cli/test_scaffold_add.py`.
"""

import re
import shutil
from pathlib import Path

import pytest

from curry_train.cli.ownership import TECHNIQUES

from ..warm_python import warm_python
from .scaffold_case import REAL, after, refusal, scaffold, shell, times, tree, write

ROOMS = [technique for technique in TECHNIQUES if technique.rooms]
TOOLS = [technique for technique in TECHNIQUES if technique.usage and not technique.rooms]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Make a user's repository with src layout, and tests that are a package; go into it."""
    root = tmp_path / "repository"
    write(root / "pyproject.toml", '[tool.pytest.ini_options]\naddopts = ["--strict-markers"]\n')
    write(root / "src/mylib/__init__.py", "")
    write(root / "tests/__init__.py", "")
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize(("inside", "tests_init"), [("training", True), ("mylib/training", False)])
def test_add_into_flat_layout_from_elsewhere_runs_too(bundle, inside, tests_init):
    root = Path("my repository")
    write(root / "setup.py", "")
    write(root / "mylib/__init__.py", "")
    if tests_init:
        write(root / "tests/__init__.py", "")
    command = after(scaffold(bundle, "add sac --into", root / inside).stdout, "Next:")
    assert command == "cd 'my repository' && python -m pytest tests/test_sac.py"
    ran = shell(command)
    assert "1 passed" in ran.stdout, ran.stdout


def test_add_into_a_project_of_new(bundle):
    scaffold(bundle, "new run")
    assert "use --into" in refusal(bundle, "add sac --into run")
    scaffold(bundle, "add sac --into run/techniques")
    # The project is still the same project.
    assert "Nothing to do" in scaffold(bundle, "update run").stdout


@pytest.mark.parametrize("package", ["mylib", "new"])
def test_add_twice_changes_nothing(bundle, repository, package):
    line = f"add grad-accum --into src/{package}/training"
    scaffold(bundle, line)
    before = times(repository)
    again = scaffold(bundle, line)
    assert times(repository) == before
    assert "Nothing to do" in again.stdout


def test_add_refuses_a_foreign_file_before_it_writes(bundle, repository):
    write(repository / "src/mylib/training/__init__.py", "")
    write(repository / "src/mylib/training/blocks.py", "MINE = 1\n")
    before = tree(repository)
    refused = refusal(bundle, "add sac --into src/mylib/training")
    assert "in the way: src/mylib/training/blocks.py. Move them" in refused
    assert tree(repository) == before
    added = scaffold(bundle, "add sac --into src/mylib/training/techniques")
    assert after(added.stdout, "Next:") == "PYTHONPATH=src python -m pytest tests/test_sac.py"


def test_add_again_updates_the_others_keeps_edits_and_brings_back_what_was_deleted(
    bundle, repository
):
    line = "add sac --into src/mylib/training"
    scaffold(bundle, line)
    package = repository / "src/mylib/training"
    write(package / "sac.py", "EDITED = True\n")
    (package / "checkpointed.py").unlink()
    (package / "__init__.py").unlink()
    (package / "blocks.py").chmod(0o640)
    newer = "def find_blocks():\n    return ['newer']\n"
    write(bundle.package / "core/blocks.py", newer)
    before = tree(repository)
    planned = scaffold(bundle, line, "--dry-run")
    assert tree(repository) == before
    done = scaffold(bundle, line)
    assert done.stdout.startswith(planned.stdout.replace("Dry run: would write", "Wrote"))
    assert "keep       src/mylib/training/sac.py" in done.stdout
    assert (package / "sac.py").read_text() == "EDITED = True\n"
    assert (package / "checkpointed.py").is_file()
    assert (package / "__init__.py").is_file()
    assert (package / "blocks.py").read_text() == newer
    assert (package / "blocks.py").stat().st_mode & 0o777 == 0o640
    scaffold(bundle, line, "--overwrite")
    assert "def apply_sac" in (package / "sac.py").read_text()


@pytest.mark.parametrize("link", ["src/mylib/training", "src/mylib/training/blocks.py", "tests"])
def test_add_does_not_follow_a_link_out_of_the_project(bundle, repository, tmp_path, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(repository / "tests")
    (repository / link).parent.mkdir(exist_ok=True)
    (repository / link).symlink_to(outside)
    assert "out of" in refusal(bundle, "add sac --into src/mylib/training")
    assert tree(outside) == {}


def test_add_goes_to_one_package_of_a_project(bundle, repository):
    scaffold(bundle, "add grad-accum --into src/mylib/training")
    refused = refusal(bundle, "add sac --into src/mylib/other")
    assert f"use --into {repository}/src/mylib/training" in refused


@pytest.mark.parametrize("technique", [*TOOLS, *ROOMS], ids=lambda technique: technique.name)
def test_add_of_a_tool_or_a_room_prints_what_to_run_or_to_write_and_copies_nothing(
    technique, tmp_path
):
    printed = scaffold(REAL, f"add {technique.name} --into training").stdout
    assert tree(tmp_path) == {}
    if technique in TOOLS:
        tool = f"{technique.name} is a tool; nothing is copied. Run:\n  curry-train "
        assert printed.startswith(tool)
        return
    assert printed.startswith("Nothing is copied without --own.\n")
    assert re.search(r'^Dependency:\n  "curry-train==[\d.]+"$', printed, re.MULTILINE)
    lines = printed.split("In the training loop:\n")[1].splitlines()[:-1]
    compile("\n".join(line.removeprefix("  ") for line in lines), "loop", "exec")


def test_add_own_of_the_real_room_saves_and_resumes_without_the_package():
    write("setup.py", "")
    scaffold(REAL, "add checkpoint-policy --own --into saving")
    write("use.py", USE_SAVING)
    python = warm_python()
    assert shell(f"{python} use.py").stdout == "None\n"
    assert shell(f"{python} use.py").stdout == "2\n"


USE_SAVING = """
import sys
sys.modules["curry_train"] = None
import torch
from saving.runs import saving

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = saving(model, optimizer, runs="runs/mine", rollback_every=1)
print(run.resumed.saved.step if run.resumed else None)
for _ in range(2):
    loss = model(torch.ones(2)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.step(loss=loss)
run.close()
"""
