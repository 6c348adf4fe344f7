"""Claude Code loads an eval case, copies its fixture and grades it.

Nobody is logged in, so the run ends unanswered and its graders judge the untouched fixture.
Without the client's package the tests skip; `make clients` installs it.
Run: `python -m pytest tests/evals/test_claude_plugin_eval.py`.
"""

import shutil
import subprocess

import pytest

from clients import CLIENTS, LONGEST_RUN, Place

from ..command_runs import read_json
from ..skills.client_packages import NODE, Unavailable, package
from ..tree import ROOT

CLAUDE = CLIENTS["Claude Code"]


@pytest.fixture(scope="module")
def executable():
    try:
        package(NODE)
        return package(CLAUDE.package) / "node_modules/.bin" / CLAUDE.executable
    except Unavailable as error:
        pytest.skip(str(error))


def run(executable, folder, *words):
    """Run `claude plugin eval` offline; return its output and its record."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    place = Place(executable, folder / "home", ROOT)
    offline = ["--runs", "1", "--no-publish", "--trust-plugin", "--scaffold", "--ablation", "none"]
    written = ["--output-dir", folder, "--json", folder / "a.json"]
    ended = subprocess.run(
        [*place.words, "plugin", "eval", *words, *offline, *written],
        env=place.environment | {"TMPDIR": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN,
    )
    return ended.stdout + ended.stderr, read_json(folder / "a.json")


def test_the_cases_of_a_skill_are_found_in_a_plugin(executable, tmp_path):
    plugin = tmp_path / "plugin"
    shutil.copytree(ROOT / "skills/grad-accum", plugin)
    shutil.copytree(ROOT / "evals/grad-accum", plugin / "evals")
    output, record = run(executable, tmp_path, plugin, "--case", "*uneven*")
    (case,) = record["cases"]
    assert case["name"] == "grad-accum-uneven-lengths", output
    (one,) = case["arms"]["with"]
    assert "Not logged in" in one["error"]
    graded = {grader["name"]: grader["passed"] for grader in one["graders"]}
    assert graded == {"skill-fired": False, "keeps-train-py-api": True}, output
