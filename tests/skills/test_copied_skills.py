"""A skill can be followed wherever it was installed: with the bundle around it, or as its folder alone.

The user's repository, with the model, is elsewhere each time, as it is for an agent. Paths hold a space.
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

# Each skill opens its steps with these words.
TOLD = """\
Paths start at ROOT, the full path of `../..` from this skill's folder. If it has no `scripts/`, only the skill was
copied: `git clone https://github.com/curry-train/curry-train ~/curry-train` gets ROOT. Run from the user's folder,
where `--model package.module:factory` is found: `python "ROOT/scripts/..."`, and, for Python blocks too,
`PYTHONPATH="ROOT/template" python ...`.
"""
NAMES = [skill.name for skill in skills(ROOT)]
# The command of each skill that runs in the copy: the cheapest that shows that its paths are found. A skill that is not
# named runs its gates.
CHEAPEST = {
    "bench": "python -m curry_train bench .*--against",
    "checkpoint-policy": "runs estimate",
    "grad-accum": "python scripts/scaffold.py add",  # its Python blocks run below
    "grad-flow": "python -m curry_train grad-flow",
    "memory-plan": "plan_memory.py .*--explain",
    "recompute": "gen_checkpoint_tests.py",
    "snn-timesteps": "python -m curry_train memory",
}
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
MODEL = """\
import torch


def build():
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)) for _ in range(3)]
    return torch.nn.Sequential(*layers), torch.randn(8, 16)
"""


def problems_of_a_copy(folder: Path) -> list[str]:
    """What in a skill's folder needs something outside of it, other than through the words of TOLD."""
    page = (folder / "SKILL.md").read_text(encoding="utf-8")
    _, _, steps = page.partition("\n## Steps\n")
    found = (
        []
        if steps.startswith(TOLD)
        else ["SKILL.md: open its steps with the words of TOLD in this test"]
    )
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        for up in re.findall(r"(?:\.\./)+\w[\w./-]*", text.replace(TOLD, "")):
            if not (path.parent / up).resolve().is_relative_to(folder):
                found.append(
                    f"{path.name} names {up}, which is outside of a copy: write the path from the root"
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


def as_told(command: str, root: Path) -> str:
    """The command as an agent types it that follows TOLD, for the user's own model."""
    assert command.startswith(("python scripts/", "PYTHONPATH=template python ")), command
    command = re.sub(
        r"^python (scripts/\w+\.py)", lambda found: f'python "{root}/{found[1]}"', command
    )
    command = command.replace("PYTHONPATH=template ", f'PYTHONPATH="{root}/template" ', 1)
    return re.sub(r"--(model|against) \w+", r"--\1 mymodel:build", command)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A home of its own, `python` being this one, and no way into this repository."""
    folder = tmp_path_factory.mktemp("another place")
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (folder / "bin/python").chmod(0o755)
    (folder / "home").mkdir()
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHONPATH", "GIT_", "CURRY_"))
    }
    kept |= {
        "HOME": str(folder / "home"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    return folder, kept | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def user(tmp_path):
    """A user's repository, in which an agent works."""
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
    """The bundle as a client installs it, where nobody may write."""
    root = copy_bundle(elsewhere[0] / "plug ins/curry-train")
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", root / "template", root / "scripts"], check=True
    )
    paths = [root, *root.rglob("*")]  # with what Python would write there by itself
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
    """What the command in TOLD brings; a local repository stands in for the address, as git's own insteadOf."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed, and a copied skill gets the rest with it")
    folder, environment = elsewhere
    origin = copy_bundle(folder / "origin")
    clone, address = re.search(r"`(git clone (\S+) ~/curry-train)`", TOLD).groups()
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
def test_a_command_of_the_skill_runs_from_the_users_folder(name, read_only, elsewhere, user):
    command = as_told(chosen(name, CHEAPEST.get(name, f"--gate {name} ")), read_only)
    ended = run(command, user, elsewhere[1])
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    if "--out" in command:
        assert len(list(user.iterdir())) > 2, "what it wrote is in the user's folder"


def test_python_blocks_run_from_the_users_folder(read_only, elsewhere, user):
    block = fenced_blocks(
        (read_only / "skills/grad-accum/SKILL.md").read_text(), language="python"
    )[0]
    (user / "block.py").write_text(block.text)
    ended = run(f'PYTHONPATH="{read_only}/template" python block.py', user, elsewhere[1])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_command_without_the_root_is_not_found(name, elsewhere, user):
    """Were it found, these tests would be about this repository and not about the copy."""
    ended = run(chosen(name, "python scripts/"), user, elsewhere[1])
    assert ended.returncode != 0
    assert "can't open file" in ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_skill_copied_alone_says_how_to_get_the_rest_and_that_suffices(
    name, cloned, elsewhere, user
):
    alone = user / ".agents/skills" / name
    shutil.copytree(ROOT / "skills" / name, alone)
    assert problems_of_a_copy(alone) == []
    assert not any(
        (alone / "../.." / folder).exists() for folder in ("scripts", "template")
    )  # so TOLD's `if` applies
    command = as_told(chosen(name, "scripts/scaffold.py add"), cloned).replace(" --dry-run", "")
    ended = run(command, user, elsewhere[1])
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    assert (user / "my_package/training").is_dir()


def test_a_gate_runs_on_the_users_model_from_what_a_copied_skill_gets(cloned, elsewhere, user):
    command = as_told(chosen("sac", "--gate sac "), cloned)
    ended = run(command, user, elsewhere[1])
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    assert "sac/products" in ended.stdout


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("`../..` from this", "two up from this", "open its steps with the words of TOLD"),
        ("git clone https", "get https", "open its steps with the words of TOLD"),
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
