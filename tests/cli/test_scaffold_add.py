"""One technique into a repository that exists: where it goes, whose files it spares, and that its test runs there."""

import os
import re
from pathlib import Path

import pytest
from scaffold_case import ROOT, after, make_bundle, scaffold, shell, times, tree, write
from warm_python import warm_python

from scaffolding.bundle import Technique, read_bundle
from scaffolding.target import find_target

TECHNIQUES = read_bundle(ROOT).techniques


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A user's repository with src layout, and tests that are a package."""
    root = tmp_path / "repository"
    write(root / "pyproject.toml", '[tool.pytest.ini_options]\naddopts = ["--strict-markers"]\n')
    write(root / "src/mylib/__init__.py", "")
    write(root / "tests/__init__.py", "")
    return root


def test_add_into_src_layout_prints_the_command_that_runs_its_test(
    bundle: Path, repository: Path
) -> None:
    added = scaffold(bundle, "add", "grad-accum", "--into", "src/mylib/training", cwd=repository)
    assert added.returncode == 0, added.stderr
    command = after(added.stdout, "Next:")
    assert command == "PYTHONPATH=src python -m pytest tests/gates/test_grad_accum.py"
    ran = shell(command, cwd=repository)
    assert "1 passed" in ran.stdout, ran.stdout
    line = after(added.stdout, "Use it:")
    assert line == "from mylib.training.primitives import Accumulation"
    assert shell(f'PYTHONPATH=src python -c "{line}"', cwd=repository).returncode == 0


@pytest.mark.parametrize("tests_init", [True, False])
@pytest.mark.parametrize("inside", ["training", "mylib/training"])
def test_add_into_flat_layout_from_elsewhere_runs_too(
    bundle: Path, tmp_path: Path, inside: str, tests_init: bool
) -> None:
    root = tmp_path / "my repository"
    write(root / "setup.py", "")
    write(root / "mylib/__init__.py", "")
    if tests_init:
        write(root / "tests/__init__.py", "")
    added = scaffold(bundle, "add", "recompute", "--into", root / inside, cwd=tmp_path)
    assert added.returncode == 0, added.stderr
    command = after(added.stdout, "Next:")
    assert command == "cd 'my repository' && python -m pytest tests/gates/test_recompute.py"
    ran = shell(command, cwd=tmp_path)
    assert "1 passed" in ran.stdout, ran.stdout


def test_add_into_a_scaffolded_project_that_lacks_it(bundle: Path, tmp_path: Path) -> None:
    scaffold(bundle, "new", "run", "--technique", "grad-accum", cwd=tmp_path)
    project = tmp_path / "run"
    write(project / "curry_train/__init__.py", '"""Mine now."""\n')
    missing = shell('python -c "from curry_train.primitives import Recompute"', cwd=project)
    assert "scaffold.py add recompute --into curry_train" in missing.stderr
    added = scaffold(bundle, "add", "recompute", "--into", "curry_train", cwd=project)
    assert added.returncode == 0, added.stderr
    assert "yours    curry_train/__init__.py" in added.stdout
    assert "1 passed" in shell(after(added.stdout, "Next:"), cwd=project).stdout
    assert (project / "curry_train/__init__.py").read_text() == '"""Mine now."""\n'


def test_add_without_a_project_uses_the_current_folder_or_the_packages_parent(
    tmp_path: Path,
) -> None:
    work, other = _folder(tmp_path / "work/sub").parent, _folder(tmp_path / "other")
    inside = find_target(Path("sub/training"), working_directory=work)
    assert (inside.root, inside.package, inside.search_path) == (work, "training", work / "sub")
    outside = find_target(other / "training", working_directory=work)
    assert (outside.root, outside.package, outside.search_path) == (other, "training", other)


def test_add_leaves_an_init_of_the_user_and_brings_no_marker_for_it(
    bundle: Path, repository: Path
) -> None:
    write(repository / "src/mylib/training/__init__.py", "MINE = 1\n")
    added = scaffold(
        bundle, "add", "grad-accum", "--into", "src/mylib/training", "--overwrite", cwd=repository
    )
    assert "yours    src/mylib/training/__init__.py" in added.stdout
    made = tree(repository / "src/mylib/training")
    assert made["__init__.py"] == b"MINE = 1\n"
    assert "py.typed" not in made
    assert "core/tables/costs.json" in made
    assert "1 passed" in shell(after(added.stdout, "Next:"), cwd=repository).stdout


def test_add_twice_changes_nothing(bundle: Path, repository: Path) -> None:
    arguments = ("add", "grad-accum", "--into", "src/mylib/training")
    scaffold(bundle, *arguments, cwd=repository)
    before = times(repository)
    again = scaffold(bundle, *arguments, cwd=repository)
    assert (again.returncode, times(repository)) == (0, before)
    assert "Nothing to do" in again.stdout


def test_add_refuses_a_foreign_file_before_it_writes(bundle: Path, repository: Path) -> None:
    write(repository / "src/mylib/training/core/__init__.py", "MINE = 1\n")
    before = tree(repository)
    refused = scaffold(bundle, "add", "grad-accum", "--into", "src/mylib/training", cwd=repository)
    assert refused.returncode == 2
    assert "src/mylib/training/core/__init__.py: yours" in refused.stderr
    assert f"--into {repository}/src/mylib/training/curry_train" in refused.stderr
    assert tree(repository) == before
    apart = scaffold(
        bundle, "add", "grad-accum", "--into", "src/mylib/training/curry_train", cwd=repository
    )
    assert apart.returncode == 0, apart.stderr
    assert "1 passed" in shell(after(apart.stdout, "Next:"), cwd=repository).stdout


def test_add_tells_an_edit_from_an_older_bundle_and_overwrites_on_request(
    bundle: Path, repository: Path
) -> None:
    arguments = ("add", "recompute", "--into", "src/mylib/training")
    scaffold(bundle, *arguments, cwd=repository)
    package = repository / "src/mylib/training/primitives"
    write(package / "recompute.py", "class Recompute: edited = True\n")
    newer = "from .recompute import Region\n\nOFFLOAD = Region\nNEWER = 1\n"
    write(bundle / "template/curry_train/primitives/offload.py", newer)
    before = tree(repository)
    refused = scaffold(bundle, *arguments, cwd=repository)
    assert refused.returncode == 2
    assert "2 files are in the way; nothing was written" in refused.stderr
    assert "recompute.py: edited by you (it came from bundle 0.1.0)" in refused.stderr
    assert "offload.py: from an older bundle (0.1.0), not edited by you" in refused.stderr
    assert tree(repository) == before

    planned = scaffold(bundle, *arguments, "--overwrite", "--dry-run", cwd=repository)
    assert tree(repository) == before
    (package / "offload.py").chmod(0o640)
    done = scaffold(bundle, *arguments, "--overwrite", cwd=repository)
    assert planned.stdout.replace("Dry run: would write", "Wrote") == done.stdout
    changed = {path for path, content in tree(repository).items() if before[path] != content}
    assert changed == {
        line.split()[1] for line in done.stdout.splitlines() if line.startswith("replace")
    }
    assert (package / "offload.py").read_text() == newer
    assert (package / "offload.py").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("link", ["src/mylib/training", "src/mylib/training/core", "tests"])
def test_add_does_not_follow_a_link_out_of_the_project(
    bundle: Path, repository: Path, tmp_path: Path, link: str
) -> None:
    outside = _folder(tmp_path / "outside")
    for file in (repository / "tests").iterdir():
        file.unlink()
    (repository / "tests").rmdir()
    (repository / link).parent.mkdir(exist_ok=True)
    (repository / link).symlink_to(outside)
    refused = scaffold(bundle, "add", "grad-accum", "--into", "src/mylib/training", cwd=repository)
    assert refused.returncode == 2
    assert "out of" in refused.stderr
    assert tree(outside) == {}


def test_add_writes_through_a_link_that_stays_in_the_project(
    bundle: Path, repository: Path
) -> None:
    _folder(repository / "elsewhere")
    (repository / "src/mylib/training").symlink_to(repository / "elsewhere")
    assert (
        scaffold(
            bundle, "add", "grad-accum", "--into", "src/mylib/training", cwd=repository
        ).returncode
        == 0
    )
    assert "primitives/grad_accum.py" in tree(repository / "elsewhere")


def test_add_goes_to_one_package_of_a_project(bundle: Path, repository: Path) -> None:
    scaffold(bundle, "add", "grad-accum", "--into", "src/mylib/training", cwd=repository)
    refused = scaffold(bundle, "add", "recompute", "--into", "src/mylib/other", cwd=repository)
    assert refused.returncode == 2
    assert f"use --into {repository}/src/mylib/training" in refused.stderr


def add_and_test(technique: Technique, repository: Path, *, chosen: str = "") -> str:
    """Add it, run its own test as the command says, or what is chosen of it, and use it; what the test printed."""
    added = scaffold(ROOT, "add", technique.name, "--into", "src/mylib/training", cwd=repository)
    assert added.returncode == 0, added.stderr
    variables = {
        "PATH": f"{Path(warm_python()).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ran = shell(after(added.stdout, "Next:") + chosen, cwd=repository, **variables)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    line = after(added.stdout, "Use it:")
    assert shell(f'PYTHONPATH=src python -c "{line}"', cwd=repository, **variables).returncode == 0
    return ran.stdout


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_add_brings_a_technique_whose_gates_hold_there(
    technique: Technique, repository: Path
) -> None:
    """Every gate on one model, and one on two ranks, which import the package anew; all of its test is a long one."""
    model = "snn" if technique.name == "snn-timesteps" else "mlp"
    ran = add_and_test(technique, repository, chosen=f' -k "gates_hold and {model} or ranks_hold"')
    assert int(re.search(r"(\d+) passed", ran)[1]) >= 2, ran  # type: ignore[index]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_add_brings_a_technique_whose_own_test_passes_there(
    technique: Technique, repository: Path
) -> None:
    add_and_test(technique, repository)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
