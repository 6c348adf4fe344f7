"""Skills work wherever they were installed: inside the bundle, or as a folder alone.

The user's repository, with the model, is in another folder, as it is for an agent. Paths hold a
space.
Run: `python -m pytest tests/skills/test_copied_skills.py`.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown import fenced_blocks
from tree import ROOT, files, skills
from warm_python import warm_python

# Each skill opens its steps with this paragraph.
ORIENTATION = """\
Commands are `curry-train ...`. Where that is missing, `python "ROOT/scripts/curry_train.py" ...`
is the same; ROOT is the full path of `../..` from this skill's folder. If ROOT has no `scripts/`,
only the skill was copied: `git clone https://github.com/curry-train/curry-train ~/curry-train`
gets ROOT. The command `python -m pip install ROOT` installs `curry-train` and the package that
Python blocks import. Run from the user's folder, where `--model package.module:factory` is found.
"""
NAMES = [skill.name for skill in skills(ROOT)]
# The command of each skill that runs in the copy: the cheapest that shows that its paths are found.
# A skill that is not listed runs its gates.
CHEAPEST = {
    "bench": "curry-train bench .*--against",
    "checkpoint-policy": "runs estimate",
    "grad-accum": "curry-train add",  # its Python blocks run below
    "grad-flow": "curry-train grad-flow",
    "memory-plan": "curry-train plan .*--explain",
    "recompute": "curry-train gen-tests",
    "snn-timesteps": "curry-train memory",
}
TOOLS = {"bench", "memory-plan"}  # `add` prints the command to run instead of copying
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


def problems_of_a_copy(folder: Path) -> list[str]:
    """List what a skill's folder needs from outside of it, but for ORIENTATION."""
    page = (folder / "SKILL.md").read_text(encoding="utf-8")
    _, _, steps = page.partition("\n## Steps\n")
    found = (
        []
        if steps.startswith(ORIENTATION)
        else ["SKILL.md: open its steps with ORIENTATION of this test"]
    )
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        for up in re.findall(r"(?:\.\./)+\w[\w./-]*", text.replace(ORIENTATION, "")):
            if not (path.parent / up).resolve().is_relative_to(folder):
                found.append(
                    f"{path.name} names {up}, which is outside of a copy: "
                    "write the path from the root"
                )
        for target in (first or second for first, second in LINK.findall(text)):
            inside = (path.parent / target.partition("#")[0]).resolve()
            if not re.match(r"https?://|#", target) and not (
                inside.is_relative_to(folder) and inside.exists()
            ):
                found.append(
                    f"{path.name} links to {target}, which is not in a copy of the skill's folder"
                )
    return found


def commands(name: str) -> list[str]:
    page = (ROOT / "skills" / name / "SKILL.md").read_text(encoding="utf-8")
    return [
        line for block in fenced_blocks(page, language="bash") for line in block.text.splitlines()
    ]


def chosen(name: str, pattern: str) -> str:
    return next(line for line in commands(name) if re.search(pattern, line))


def from_root(command: str, root: Path) -> str:
    """Return a command as an agent types it from ORIENTATION, for the user's own model."""
    assert command.startswith("curry-train "), command
    command = command.replace("curry-train", f'python "{root}/scripts/curry_train.py"', 1)
    return re.sub(r"--(model|against) \w+", r"--\1 mymodel:build", command)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Return a folder with a home of its own, where `python` is this one."""
    folder = tmp_path_factory.mktemp("another place")
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (folder / "bin/python").chmod(0o755)
    (folder / "home").mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHONPATH", "GIT_", "CURRY_"))
    }
    environment |= {
        "HOME": str(folder / "home"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    return folder, environment | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def quick(elsewhere):
    """Return the same environment, where `python` has imported torch already."""
    folder, environment = elsewhere
    (folder / "quick").mkdir()
    (folder / "quick/python").symlink_to(warm_python())
    return environment | {"PATH": f"{folder / 'quick'}{os.pathsep}{environment['PATH']}"}


@pytest.fixture
def user(tmp_path):
    """Make a user's repository, in which an agent works."""
    folder = tmp_path / "their repository"
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package/__init__.py").touch()
    (folder / "mymodel.py").write_text(MODEL)
    return folder


def copy_bundle(root: Path) -> Path:
    for path in files(ROOT):
        target = root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return root


@pytest.fixture(scope="module")
def read_only(elsewhere):
    """Copy the bundle as a client installs it, where nobody may write."""
    root = copy_bundle(elsewhere[0] / "plug ins/curry-train")
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", root / "template", root / "scripts"], check=True
    )
    paths = [root, *root.rglob("*")]  # includes the caches that Python would write
    before = {path: path.stat().st_mtime_ns for path in paths}
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    yield root
    for path in paths:
        path.chmod(path.stat().st_mode | 0o200)
    assert {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]} == before, (
        "a command wrote into it"
    )


@pytest.fixture(scope="module")
def cloned(elsewhere):
    """Clone as ORIENTATION says; git's insteadOf puts a local repository in the address's place."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed, and a copied skill gets the rest with it")
    folder, environment = elsewhere
    origin = copy_bundle(folder / "origin")
    clone, address = re.search(r"`(git clone (\S+) ~/curry-train)`", ORIENTATION).groups()
    git = ["git", "-C", str(origin), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (
        ["init", "--quiet"],
        ["add", "--all"],
        ["commit", "--quiet", "--message", "the bundle"],
    ):
        subprocess.run([*git, *words], env=environment, check=True)
    (folder / "home/.gitconfig").write_text(f'[url "file://{origin}"]\n\tinsteadOf = {address}\n')
    subprocess.run(clone, shell=True, cwd=folder, env=environment, check=True, capture_output=True)
    return folder / "home/curry-train"


def run(
    command: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )


def test_all_skills_are_tried():
    assert len(NAMES) >= 8
    assert set(CHEAPEST) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_of_the_skill_runs_from_the_users_folder(name, read_only, quick, user):
    command = from_root(chosen(name, CHEAPEST.get(name, f"--gate {name} ")), read_only)
    ended = run(command, user, quick)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    if "--out" in command:
        assert len(list(user.iterdir())) > 2, "its output must be in the user's folder"


@pytest.fixture(scope="module")
def installed(cloned, elsewhere):
    """Install as ORIENTATION says, into a folder instead of an environment."""
    folder, environment = elsewhere
    target = folder / "installed"
    command = (
        "python -m pip install ROOT --no-deps --no-build-isolation --no-index --quiet --target"
    )
    assert command.startswith(re.search(r"`(python -m pip install ROOT)`", ORIENTATION)[1])
    command = command.replace("ROOT", f'"{cloned}"') + f' "{target}"'
    ended = run(command, folder, environment)
    assert ended.returncode == 0, ended.stderr
    return target


def test_python_blocks_run_from_the_users_folder_once_installed(installed, elsewhere, user):
    page = ROOT / "skills/grad-accum/SKILL.md"
    (user / "block.py").write_text(fenced_blocks(page.read_text(), language="python")[0].text)
    ended = run(f'PYTHONPATH="{installed}" python block.py', user, elsewhere[1])
    assert ended.returncode == 0, ended.stderr


def test_the_installed_command_runs_on_the_users_model(installed, elsewhere, user):
    command = chosen("grad-accum", "--gate grad-accum ").replace("transformer", "mymodel:build")
    command = command.replace("--gate grad-accum ", "--gate grad-accum/equal ")
    environment = elsewhere[1] | {"PYTHONPATH": str(installed)}
    ended = run(f'"{installed}/bin/"{command}', user, environment)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    assert "grad-accum/equal" in ended.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_skill_copied_alone_gets_the_rest_by_its_own_instructions(name, cloned, elsewhere, user):
    alone = user / ".agents/skills" / name
    shutil.copytree(ROOT / "skills" / name, alone)
    assert problems_of_a_copy(alone) == []
    assert not any(
        (alone / "../.." / folder).exists() for folder in ("scripts", "template")
    )  # so ORIENTATION's `if` applies
    if name in TOOLS:
        command = from_root(f"curry-train add {name}", cloned)
    else:
        command = from_root(chosen(name, "curry-train add"), cloned).replace(" --dry-run", "")
    ended = run(command, user, elsewhere[1])
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    assert (user / "my_package/training").is_dir() == (name not in TOOLS)


def test_a_gate_runs_on_the_users_model_from_the_clone_of_a_copied_skill(cloned, elsewhere, user):
    command = from_root(chosen("sac", "--gate sac "), cloned)
    ended = run(command, user, elsewhere[1])
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    assert "sac/products" in ended.stdout


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("`../..` from this", "two up from this", "open its steps with ORIENTATION"),
        ("git clone https", "get https", "open its steps with ORIENTATION"),
        (
            "# Recompute",
            "# [Another](../sac/SKILL.md)",
            "links to ../sac/SKILL.md, which is not in a copy",
        ),
        (
            "# Recompute",
            "# Recompute: see `../sac/SKILL.md`",
            "names ../sac/SKILL.md, which is outside of a copy",
        ),
        (
            "(references/theory.md)",
            "(references/gone.md)",
            "links to references/gone.md, which is not in a copy",
        ),
    ],
)
def test_a_planted_fault_in_a_copy_is_caught(tmp_path, old, new, problem):
    folder = tmp_path / "recompute"
    shutil.copytree(ROOT / "skills/recompute", folder)
    page = folder / "SKILL.md"
    text = page.read_text()
    assert old in text
    page.write_text(text.replace(old, new, 1))
    assert any(problem in found for found in problems_of_a_copy(folder)), problems_of_a_copy(folder)
