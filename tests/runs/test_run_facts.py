"""Facts that describe a run: its command, config, code and environment.

python -m pytest tests/runs/test_run_facts.py
"""

import json
import subprocess
import sys

import pytest
import torch

from curry_train.runs.history import git_state, run_facts


def git(folder, *words):
    name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *name, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_facts_are_json_with_everything_that_describes_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(tmp_path / "train.py"), "steps=3"])
    found = run_facts({"steps": 3}, device=torch.device("cpu"), world_size=4)
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["command", "config", "code", "environment"]
    environment = found["environment"]
    assert (environment["world_size"], environment["torch"]) == (4, torch.__version__)
    assert environment["device"].startswith("cpu (")
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(json.dumps(found)) < 50_000
    assert found["command"] == "python train.py steps=3"
    # No path of this machine.
    assert str(tmp_path) not in json.dumps(found)
    assert sys.prefix not in json.dumps(found)


def test_two_different_changes_of_code_have_different_facts(repository):
    clean = git_state(repository)
    assert (len(clean["revision"]), clean["dirty"]) == (40, False)
    (repository / "notes.txt").write_text("no code")
    assert git_state(repository) == clean
    states = []
    # A module that git does not know is a change too.
    for name in ("train.py", "new.py"):
        for text in ("a = 2\n", "a = 3\n"):
            (repository / name).write_text(text)
            states.append(git_state(repository))
    assert all(state["dirty"] and state["revision"] == clean["revision"] for state in states)
    assert len({state["changes"] for state in states}) == 4


def test_a_missing_revision_is_recorded_with_the_reason(tmp_path):
    assert "not a git repository" in git_state(tmp_path)["why"]
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {"revision": None, "why": "fatal: Needed a single revision"}
