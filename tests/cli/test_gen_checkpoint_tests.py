"""Generated tests pass on a fit model, and fail on an unfit one with block and cause.

Run: `python -m pytest tests/cli/test_gen_checkpoint_tests.py`.
"""

import functools
import os
import re
import shutil
import sys

import pytest

import curry_train
from curry_train.cli.testgen import GENERATED_FILE_MARK

from ..command_runs import finished, in_python, ran, results_of_tests
from ..tree import ROOT
from ..warm_python import warm_python

TEMPLATE = str(ROOT / "template")

# A repository with src/, whose models are fit or unfit for recompute; plain training shows no
# difference.
MODELS = """
import random

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, disturb=None):
        super().__init__()
        self.inner, self.outer, self.disturb = nn.Linear(8, 24), nn.Linear(24, 8), disturb

    def forward(self, x):
        hidden = torch.sigmoid(self.inner(x))
        return x + torch.sin(self.outer(self.disturb(self, hidden) if self.disturb else hidden))


def python_random(block, x):
    return x * random.random()


def other_in_backward(block, x):
    return x * (2 if torch._C._current_graph_task_id() >= 0 else 1)


def model(disturb=None):
    blocks = [Block(), Block(disturb), Block()]
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleList(blocks)[0], *blocks[1:]), torch.randn(8, 8)


def healthy():
    return model()
"""
UNFIT = {
    "python_random": "draws from python's generator",
    "other_in_backward": "keeps state between calls",
}


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """Make a user's repository with src/theirs/, and a copy of the package in src/mylib/."""
    root = tmp_path_factory.mktemp("repository")
    package = root / "src/theirs"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    factories = [f"\n\ndef {name}_model():\n    return model({name})\n" for name in UNFIT]
    (package / "models.py").write_text(MODELS + "".join(factories))
    (root / "src/mylib").mkdir()
    (root / "src/mylib/__init__.py").touch()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "template/curry_train", root / "src/mylib/training", ignore=ignored)
    (root / "tests").mkdir()
    return root


@pytest.fixture
def run(repository, monkeypatch):
    monkeypatch.chdir(repository)
    monkeypatch.syspath_prepend(repository / "src")
    return functools.partial(ran, "gen-tests")


def pytest_run(root, *arguments, path, **more):
    """Run pytest as a user does: in another folder, without our plugins."""
    line = f"{warm_python()} -m pytest -p no:cacheprovider -p no:xdist -q"
    more |= {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    return finished(*line.split(), *arguments, cwd=root, **more)


LOOP = """
import sys
import torch

assert sys.argv[1:] == ["--rate", "0.1"]
model = torch.nn.Linear(8, 5)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    {zero}
"""
# What is given for each file of tests.
FILES = {
    # All of recompute but the gates on ranks and of the compiler, which take longest.
    "healthy": "--model theirs.models:healthy --gate recompute/[fmop]*",
    **{name: f"--model theirs.models:{name}_model --gate recompute/parity-*" for name in UNFIT},
    "net": "--model nets/net.py:healthy --gate sac/off",
    "gone": "--model mlp --gate recompute/off",
    "right": "--script right.py -- --rate 0.1",
    "wrong": "--script wrong.py -- --rate 0.1",
}


@pytest.fixture(scope="module")
def outcomes(repository):
    """Run all files in one pytest, from their folder; return outcomes by file and test."""
    (repository / "nets").mkdir()
    shutil.copy(repository / "src/theirs/models.py", repository / "nets/net.py")
    (repository / "right.py").write_text(LOOP.format(zero="optimizer.zero_grad()"))
    (repository / "wrong.py").write_text(LOOP.format(zero="pass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        patch.syspath_prepend(repository / "src")
        for name, words in FILES.items():
            ran(f"gen-tests --out tests/test_{name}.py", words)
    gone = repository / "tests/test_gone.py"
    gone.write_text(gone.read_text().replace("recompute/off", "recompute/gone"))
    words = ("--junitxml=found.xml", *(f"test_{name}.py" for name in FILES))
    done = pytest_run(repository / "tests", *words, path=TEMPLATE, status=1)
    assert "Traceback" not in done.stdout
    found = {name: {} for name in FILES}
    for name, test, results in results_of_tests(repository / "tests/found.xml"):
        found[name][test] = results
    return found


def test_tests_of_a_fit_model_pass_or_skip_with_a_reason(outcomes):
    tests = outcomes["healthy"].values()
    assert len(tests) >= 8
    assert sum(not results for results in tests) >= 5
    assert all(len(results["skipped"]) > 30 for results in tests if results)


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_model_fails_and_the_message_names_block_and_cause(outcomes, name):
    message = outcomes[name]["test_gate_holds[recompute/parity-full]"]["failure"]
    assert f"does not hold for theirs.models:{name}_model\nmeasured: " in message
    assert "\nrequired: bit-equal\n" in message
    assert re.search(rf"\nwhat to do: 2 .*{re.escape(UNFIT[name])}", message), message


def test_a_model_in_a_file_is_found_from_any_folder(outcomes):
    assert [*outcomes["net"].values()] == [{}, {}]


def test_a_removed_gate_fails_instead_of_passing_silently(outcomes):
    messages = [results.get("failure", "") for results in outcomes["gone"].values()]
    assert any("no gate of curry_train matches" in message for message in messages), messages


def test_the_loop_of_a_script_becomes_a_test(outcomes):
    assert not any(outcomes["right"].values())
    messages = [results.get("failure", "") for results in outcomes["wrong"].values()]
    fault = "loop/zeroed: wrong.py:10: a step with gradients of the step before"
    assert any(fault in message for message in messages), messages


# The file itself.


def test_the_command_in_the_header_writes_the_same_file_again(repository, run, monkeypatch):
    line = (
        "--model theirs.models:healthy --out tests/test_again.py --gate recompute/parity-* "
        "--gate recompute/off --blocks [12] --batch-size 6 --seed 3 --dtype bfloat16 --device cpu"
    )
    arguments = line.split()
    monkeypatch.setattr(sys, "orig_argv", ["python", "bin/curry-train", "gen-tests", *arguments])
    run(*arguments)
    path = repository / "tests/test_again.py"
    text = path.read_text()
    assert f"curry-train {curry_train.__version__}." in text
    shown = re.search(r"^    curry-train (?:.*\\\n)*.*$", text, re.MULTILINE)[0]
    assert all(len(line) <= 88 for line in text.splitlines())
    path.unlink()
    command = f"{warm_python()} {ROOT / 'scripts/curry_train.py'} "
    again = shown.strip().replace("curry-train ", command, 1)
    finished("sh", "-c", again, cwd=repository, PYTHONPATH="src")
    # All but the first docstring, which has the command as it was typed.
    header, _, rest = path.read_text().partition('"""\n')
    assert rest == text.partition('"""\n')[2]
    assert f"    python {ROOT / 'scripts/curry_train.py'} gen-tests \\\n" in header


OPAQUE = """
import torch
from torch import nn


class Opaque:
    def to(self, device):
        return self


class Reads(nn.Sequential):
    def forward(self, opaque):
        return super().forward(torch.ones(2, 4))


def build():
    return Reads(*(nn.Linear(4, 4) for _ in range(3))), Opaque()
"""


def test_a_batch_that_can_not_be_divided_sets_the_batch_size_of_the_file(repository, run):
    (repository / "opaque.py").write_text(OPAQUE)
    run("--model opaque.py:build --out tests/test_opaque.py")
    assert " batch_size=1,\n" in (repository / "tests/test_opaque.py").read_text()


def test_a_file_written_by_something_else_is_not_overwritten(repository, run):
    path = repository / "tests/test_theirs.py"
    path.write_text("def test_theirs():\n    assert True\n")
    kept = run("--model mlp --out", path, status=2)
    assert "tests/test_theirs.py was not written by this command" in kept.output
    assert GENERATED_FILE_MARK not in path.read_text()
    run("--model mlp --out", path, "--overwrite")
    assert GENERATED_FILE_MARK in path.read_text()
    run("--model mlp --out", path)


def test_the_command_for_a_path_with_spaces_can_be_typed(repository, run):
    (repository / "my tests").mkdir()
    ended = run("--model mlp --out 'my tests/test_net.py' --gate recompute/off")
    assert "python -m pytest 'my tests/test_net.py'" in ended.output


def test_a_vendored_package_is_tested_with_its_own_gates(repository, run):
    out = "tests/test_vendored.py"
    ended = run(
        "--model theirs.models:healthy --package mylib.training --gate",
        "recompute/parity-full --out",
        out,
    )
    assert f"with pytest (pip install pytest)\n  python -m pytest {out}" in ended.output, (
        ended.output
    )
    assert "from mylib.training.gates import discover" in (repository / out).read_text()
    done = pytest_run(repository, out, path="")
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_model_of_an_installed_package_needs_no_folder(repository, run, monkeypatch):
    monkeypatch.setattr("curry_train.cli.testgen.LIBRARY_FOLDERS", [repository / "src"])
    out = "tests/test_installed.py"
    run("--model theirs.models:healthy --out", out)
    assert '/ "../src"' not in (repository / out).read_text()


def test_from_a_clone_the_header_names_the_script_by_its_path(tmp_path):
    path = os.path.relpath(ROOT / "scripts/gen_checkpoint_tests.py", tmp_path)
    in_python(path, "--model", "mlp", "--out", "test_mlp.py")
    assert f"    python {path} \\\n" in (tmp_path / "test_mlp.py").read_text()
