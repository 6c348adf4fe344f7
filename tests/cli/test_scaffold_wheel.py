"""Tests of the wheel that a project carries: bytes, metadata, installation.

Run: `python -m pytest tests/cli/test_scaffold_wheel.py`.
"""

import functools
import io
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from curry_train.cli import scaffold as command
from curry_train.cli.ownership import BUNDLED_FOLDER, build_wheel, find_bundle, wheel_name
from curry_train.cli.screen import UnusableInput

from ..journals import column
from ..tree import ROOT
from .scaffold_case import scaffold, shell, tree, write


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Copy the sources of the package, so that no edit changes them during the tests."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    caches = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    shutil.copytree(ROOT / "template", root / "template", ignore=caches)
    # `new` builds it for each project.
    with mock.patch.object(command, "build_wheel", functools.cache(build_wheel)):
        yield find_bundle(root / "template/curry_train")


@pytest.fixture(scope="module")
def wheel(clone):
    return command.build_wheel(clone)


# Of what the command writes.
TEXTS = (".jinja", ".md")


def test_wheel_holds_the_package_with_the_files_that_new_and_add_copy(clone, wheel):
    names = zipfile.ZipFile(io.BytesIO(wheel)).namelist()
    modules = [path.relative_to(clone.package.parent) for path in clone.package.rglob("*.py")]
    assert {path.as_posix() for path in modules} <= set(names)
    assert "curry_train/py.typed" in names
    texts = [path.name for path in (clone.package / "cli").iterdir() if path.suffix in TEXTS]
    assert {"test_gates.py.jinja", "agents_md.md"} <= set(texts)
    assert {f"curry_train/cli/{name}" for name in texts} <= set(names)
    assert f"curry_train/{BUNDLED_FOLDER}/project/train.py" in names
    assert f"curry_train/{BUNDLED_FOLDER}/project/.gitignore" in names
    assert f"curry_train/{BUNDLED_FOLDER}/tests/test_sac.py" in names
    assert not [name for name in names if "__pycache__" in name]


def test_a_wheel_that_pip_can_not_build_gets_its_message(clone, tmp_path):
    root = Path(shutil.copytree(clone.package.parents[1], tmp_path / "clone"))
    write(root / "pyproject.toml", "[build-system]\nrequires = 7\n")
    with pytest.raises(UnusableInput, match=r"pip can't build the wheel of .*clone:\n"):
        build_wheel(find_bundle(root / "template/curry_train"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Make a virtual environment with torch and the other packages, but not curry-train."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_paths()["purelib"])
    # Links instead of a path file, which would bring the editable curry-train too.
    for path in here.iterdir():
        if "curry" not in path.name and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return place


@pytest.fixture(scope="module")
def installed(environment, clone, tmp_path_factory):
    """Make a project, move it, and install its wheel from its own folder."""
    folder = tmp_path_factory.mktemp("new")
    scaffold(clone, "new my-run", cwd=folder)
    moved = (folder / "my-run").rename(tmp_path_factory.mktemp("moved") / "elsewhere")
    pin = next(
        text
        for text in tomllib.loads((moved / "pyproject.toml").read_text())["project"]["dependencies"]
        if text.startswith("curry-train")
    )
    shell(
        f"{environment}/bin/python -m pip install --no-index --find-links wheels '{pin}'", cwd=moved
    )
    return moved


def test_installed_package_makes_the_same_project_and_techniques_as_the_clone(
    environment, installed, clone, tmp_path
):
    """Use the template, tests and metadata in the wheel, without a clone."""
    write(tmp_path / "theirs/setup.py", "")
    write(tmp_path / "ours/setup.py", "")
    theirs = f"{environment}/bin/curry-train"
    shell(f"{theirs} new run && cd theirs && {theirs} add sac --into owned")
    scaffold(clone, "new other --name run")
    scaffold(clone, "add sac --into owned", cwd=tmp_path / "ours")
    theirs = tree(tmp_path / "run")
    ours = tree(tmp_path / "other")
    packed = [
        zipfile.ZipFile(io.BytesIO(files.pop(f"wheels/{wheel_name(clone)}")))
        for files in (theirs, ours)
    ]
    assert theirs == ours
    # The installed files make the wheel again that they came from. The lines of RECORD, which has
    # the hashes of the others, may have another order.
    first, second = (
        {name: {*file.read(name).split()} for name in file.namelist()} for file in packed
    )
    assert first == second
    assert tree(tmp_path / "theirs") == tree(tmp_path / "ours")
    assert shell(f"{environment}/bin/curry-train update run").stdout.startswith("same ")


@pytest.mark.parametrize("chosen", ["-k 'sigterm or wrong_word'", ""])
def test_project_passes_its_own_tests_without_the_bundle(environment, installed, chosen):
    ran = shell(f'make test PYTHON={environment}/bin/python ARGS="{chosen}"', cwd=installed)
    assert " passed" in ran.stdout


def test_make_train_creates_the_environment_once_and_trains(environment, clone, tmp_path):
    scaffold(clone, "new run")
    project = tmp_path / "run"
    shutil.copytree(environment, project / ".venv", symlinks=True)
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "BASE_PYTHON": sys.executable}
    train = 'make train ARGS="steps=12 batch_size=4 microbatch=2 evaluate.samples=4 device=cpu"'
    shell(train, cwd=project, **offline)
    (journal,) = (project / "runs").glob("*/journal.jsonl")
    losses = column(journal.parent, "step", "loss")
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert "pip install" not in shell("make --dry-run train", cwd=project, **offline).stdout


def test_owned_project_passes_its_own_tests_without_the_package(environment, clone, tmp_path):
    scaffold(clone, "new run --own")
    here = "Path(curry_train.__file__).parents[1] == Path(__file__).parent"
    write(
        tmp_path / "run/conftest.py",
        f"from pathlib import Path\n\nimport curry_train\n\nassert {here}\n",
    )
    ran = shell(f"make test PYTHON={environment}/bin/python", cwd=tmp_path / "run")
    assert " passed" in ran.stdout
