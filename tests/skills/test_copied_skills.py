"""Skills work wherever they were installed: inside the bundle, or as a folder alone.

The user's repository, with the model, is in another folder, as it is for an agent. Paths hold a
space.
Run: `python -m pytest tests/skills/test_copied_skills.py`.
"""

import os
import re
import shutil
import subprocess

import pytest

from clients import copy_bundle

from ..tree import ROOT, skills
from ..warm_python import warm_python
from .pages import fenced_blocks

# Each skill opens its steps with this paragraph.
ORIENTATION = """\
Where `curry-train` is missing: `python -m pip install ROOT`, or `python "ROOT/scripts/curry_train.py"` in its place.
ROOT is `../..` from this folder; if only the skill was copied, `git clone https://github.com/curry-train/curry-train ~/curry-train` gets it.
"""  # noqa: E501
NAMES = [skill.name for skill in skills(ROOT)]
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
MODEL = """\
import torch


def build():
    blocks = []
    for _ in range(3):
        layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)
        blocks.append(torch.nn.Sequential(*layers))
    return torch.nn.Sequential(*blocks), torch.randn(8, 16)
"""


def problems_of_a_copy(folder):
    """List what a skill's folder needs from outside of it, but for ORIENTATION."""
    found = []
    if f"\n## Steps\n{ORIENTATION}" not in (folder / "SKILL.md").read_text():
        found.append("SKILL.md: open its steps with ORIENTATION of this test")
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text().replace(ORIENTATION, "")
        links = [first or second for first, second in LINK.findall(text)]
        named = re.findall(r"(?:\.\./)+\w[\w./-]*", text)
        for target in [*links, *named]:
            inside = (path.parent / target.partition("#")[0]).resolve()
            is_web = re.match(r"https?://|#", target)
            if not is_web and not (inside.is_relative_to(folder) and inside.exists()):
                found.append(f"{path.name} leads to {target}, which is not in a copy of the skill")
    return found


def command_of(name, pattern, root):
    """Return a command of a skill as an agent types it from ORIENTATION, for the user's model."""
    page = (ROOT / "skills" / name / "SKILL.md").read_text()
    lines = [
        line for block in fenced_blocks(page, language="bash") for line in block.text.splitlines()
    ]
    command = next(line for line in lines if re.search(pattern, line))
    command = command.replace("curry-train", f'python "{root}/scripts/curry_train.py"', 1)
    return re.sub(r"--model \w+", "--model mymodel:build", command)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Return a folder with a home of its own, where `python` has imported torch already."""
    folder = tmp_path_factory.mktemp("another place")
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(warm_python())
    (folder / "home").mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHONPATH", "GIT_", "CURRY_"))
    }
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {"HOME": str(folder / "home"), "PATH": path, "OMP_NUM_THREADS": "1"}
    return folder, environment | own


@pytest.fixture
def user(tmp_path):
    """Make a user's repository, in which an agent works."""
    folder = tmp_path / "their repository"
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package/__init__.py").touch()
    (folder / "mymodel.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def read_only(elsewhere):
    """Copy the bundle as a client installs it, where nobody may write."""
    root = copy_bundle(elsewhere[0] / "plug ins/curry-train")
    before = written_at(root)
    paths = [root, *root.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    yield root
    for path in paths:
        path.chmod(path.stat().st_mode | 0o200)
    assert written_at(root) == before, "a command wrote into it"


def written_at(root):
    """Return when each file was written, but for the caches that Python writes where it may."""
    found = [path for path in root.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.stat().st_mtime_ns for path in found if path.is_file()}


@pytest.fixture(scope="module")
def cloned(elsewhere):
    """Clone as ORIENTATION says; git's insteadOf puts a local repository in the address's place."""
    folder, environment = elsewhere
    origin = copy_bundle(folder / "origin")
    clone, address = re.search(r"`(git clone (\S+) ~/curry-train)`", ORIENTATION).groups()
    (folder / "home/.gitconfig").write_text(f'[url "file://{origin}"]\n\tinsteadOf = {address}\n')
    run(clone, folder, environment)
    return folder / "home/curry-train"


def run(command, folder, environment):
    ended = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def test_a_command_runs_from_the_users_folder(read_only, elsewhere, user):
    run(command_of("grad-flow", "--plot", read_only), user, elsewhere[1])
    written = {path.name for path in user.iterdir()} - {"my_package", "mymodel.py", "__pycache__"}
    assert written, "its output must be in the user's folder"


@pytest.mark.parametrize("name", NAMES)
def test_a_skill_copied_alone_needs_nothing_from_outside(name, tmp_path):
    alone = tmp_path / ".agents/skills" / name
    shutil.copytree(ROOT / "skills" / name, alone)
    assert problems_of_a_copy(alone) == []


def test_a_copied_skill_gets_the_rest_by_its_own_instructions(cloned, elsewhere, user):
    command = command_of("recompute", "curry-train add", cloned).replace(" --dry-run", "")
    run(command, user, elsewhere[1])
    assert (user / "my_package/training").is_dir()
