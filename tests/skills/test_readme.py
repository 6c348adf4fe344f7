"""Every command and Python block of the README and the skills runs as written, in a copy.

Run: `python -m pytest tests/skills/test_readme.py`.
"""

import os
import re
import shlex
import shutil
import subprocess

import pytest
from markdown import fenced_blocks
from tree import ROOT
from warm_python import warm_python

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("skills/**/*.md"))]
BLOCKS = [
    (page, block) for page in PAGES for block in fenced_blocks(page.read_text(encoding="utf-8"))
]


# Blocks that take longest, each with tests of its own; `make long` runs them as written.
LONG_BLOCKS = (
    "# my_trainer.py",
    "# my_accelerate.py",
    "# my_lightning.py",
    "python my_trainer.py",
    "python my_accelerate.py",
    "python my_lightning.py",
    "curry-train memory --trainer my_trainer:make_trainer",
    "curry-train runs spike-check",
    "curry-train savings --out savings --model transformer",
)


def blocks(language):
    found = [(page, block) for page, block in BLOCKS if block.language == language]
    return [
        pytest.param(
            block,
            id=f"{page.relative_to(ROOT)}:{block.line}",
            marks=[pytest.mark.long] if block.text.startswith(LONG_BLOCKS) else [],
        )
        for page, block in found
    ]


def python_files_of(page):
    """Return the Python blocks that open with `# name.py`: files that the commands use."""
    sources = [
        block.text
        for language_page, block in BLOCKS
        if language_page == page and block.language == "python"
    ]
    return {found[1]: source for source in sources if (found := re.match(r"# (\w+\.py)\n", source))}


TEXTS = [
    block.text for block in fenced_blocks(PAGES[0].read_text(encoding="utf-8"), language="text")
]
# Output in the README of commands that print the same in every run; the first line names the
# machine.
SHOWN = {
    "curry-train validate --model my_model.py:build": next(
        text for text in TEXTS if " held, " in text
    )
}


# Replaces the script that pip writes for the entry point, with the python of the test.
INSTALLED_COMMAND = """\
#!/bin/sh
exec python -c 'from curry_train.cli.main import main; main(prog_name="curry-train")' "$@"
"""


def _words(printed):
    return printed.partition("\n")[2].split()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy the bundle, with a `python` that has torch, and a user's package to add to."""
    root = tmp_path_factory.mktemp("bundle") / "bundle"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, root, ignore=ignored)
    for page in PAGES:
        for name, source in python_files_of(page).items():
            (root / name).write_text(source)
    (root / "my_package").mkdir()
    (root / "my_package" / "__init__.py").touch()
    (root / "bin").mkdir()
    (root / "bin" / "python").symlink_to(warm_python())
    (root / "bin" / "curry-train").write_text(INSTALLED_COMMAND)
    (root / "bin" / "curry-train").chmod(0o755)
    return root


def test_enough_is_found():
    assert len(blocks("bash")) >= 5
    assert len(blocks("python")) >= 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", blocks("bash"))
def test_command_runs(block, copy):
    environment = os.environ | {
        "PATH": f"{copy / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(copy / "template"),
    }
    makefile = (ROOT / "Makefile").read_text()
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "make" and len(words) == 2:  # CI runs these themselves
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), (
                f"the Makefile has no target {words[1]}"
            )
            continue
        assert words[0] in ("python", "make", "curry-train", "cd")
        # Use the packages that are installed already.
        command = f"{line} PYTHON=python" if words[0] == "make" else line
        ended = subprocess.run(
            command, shell=True, cwd=copy, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
        if shown := SHOWN.get(line):
            assert _words(ended.stdout) == _words(shown)


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "template")}
    for name, source in python_files_of(PAGES[0]).items():
        (tmp_path / name).write_text(source)
    ended = subprocess.run(
        [warm_python(), "-c", block.text],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
