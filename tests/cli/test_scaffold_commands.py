"""`scaffold.py` at the terminal: the states of `diff`, what `list` shows, and one line for each mistake."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from scaffold_case import ROOT, make_bundle, scaffold, shell, tree, write

import scaffold as command


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


@pytest.fixture
def project(bundle: Path, tmp_path: Path) -> Path:
    scaffold(bundle, "new", "run", cwd=tmp_path)
    return tmp_path / "run"


def test_diff_tells_whose_change_each_file_has(bundle: Path, project: Path) -> None:
    assert scaffold(bundle, "diff", project, cwd=project).stdout.endswith(
        "22 files: 22 unchanged\n"
    )
    package = "curry_train/primitives"
    write(project / "README.md", "# Mine\n")
    write(project / f"{package}/recompute.py", "class Recompute: mine = 1\n")
    write(bundle / "template" / package / "recompute.py", "class Recompute: theirs = 1\n")
    write(bundle / "template" / package / "grad_accum.py", "class Accumulation: steps = 8")
    write(project / f"{package}/offload.py", "BOTH = 'the same'\n")
    write(bundle / "template" / package / "offload.py", "BOTH = 'the same'\n")
    (project / "curry_train/benchmark.py").unlink()
    (bundle / "template/curry_train/core/unused.py").unlink()

    done = scaffold(bundle, "diff", cwd=project)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith("unchanged ")] == [
        "edited by you         README.md",
        "deleted by you        curry_train/benchmark.py",
        "gone from the bundle  curry_train/core/unused.py",
        f"newer in the bundle   {package}/grad_accum.py",
        f"both edited and newer {package}/recompute.py",
        "22 files: 17 unchanged, 1 edited by you, 1 newer in the bundle, 1 both edited",
        "  and newer, 1 deleted by you, 1 gone from the bundle",
    ]


def test_diff_patch_turns_the_users_files_into_the_bundles(bundle: Path, project: Path) -> None:
    write(project / "README.md", "# Mine")
    (project / "curry_train/benchmark.py").unlink()
    write(
        bundle / "template/curry_train/primitives/grad_accum.py",
        "class Accumulation:\n    steps = 8",
    )
    shown = scaffold(bundle, "diff", "--patch", cwd=project).stdout
    assert "\n-# Mine\n\\ No newline at end of file\n+# run\n" in shown
    subprocess.run(["git", "apply", "-"], cwd=project, input=shown, text=True, check=True)
    assert scaffold(bundle, "diff", cwd=project).stdout.endswith("22 files: 22 unchanged\n")


def test_diff_of_an_added_technique_compares_its_moved_test(bundle: Path, tmp_path: Path) -> None:
    write(tmp_path / "repository/src/mylib/__init__.py", "")
    write(tmp_path / "repository/setup.cfg", "")
    scaffold(bundle, "add", "recompute", "--into", "repository/src/mylib/training", cwd=tmp_path)
    shown = scaffold(bundle, "diff", "repository", cwd=tmp_path).stdout
    assert "unchanged             tests/gates/test_recompute.py" in shown
    assert shown.endswith("13 files: 13 unchanged\n")


def test_list_fits_into_80_columns() -> None:
    shown = scaffold(ROOT, "list", cwd=ROOT).stdout
    assert "curry_train/primitives/grad_accum.py" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_list_ends_quietly_when_its_reader_goes_away(bundle: Path) -> None:
    ran = shell(f"python {bundle}/scripts/scaffold.py list | true", cwd=bundle)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "1run"], "'1run' can't be a project's name"),
        (["new", "run", "--name", "my run"], "give --name a Python identifier"),
        (["new", "run", "--name", "class"], "'class' can't be a project's name"),
        (["new", "run", "--name", "größe"], "ASCII"),
        (["new", "run", "--name", "__"], "ASCII"),
        (["new", "run", "--name", "torch"], "a package that the project needs itself"),
        (["new", "run", "--technique", "grad_acum"], "did you mean 'grad-accum'?"),
        (["new", "run", "--technique", "zzz"], "there are grad-accum, recompute"),
        (["new", "full"], "full exists and is not empty"),
        (["new", "file"], "file is a file"),
        (["new", "file/run"], "file is not a folder"),
        (["new", "gone/run"], "gone is not a folder"),
        (["new", "link", "--name", "run"], "link is a link"),
        (["new", ".", "--name", "run"], "exists and is not empty"),
        (["new", "x" * 300], "File name too long"),
        (["add", "Recompute2", "--into", "package"], "did you mean 'recompute'?"),
        (
            ["add", "recompute", "--into", "my-package"],
            "Python can't import a folder called 'my-package'",
        ),
        (["add", "recompute", "--into", "class"], "Python can't import a folder called 'class'"),
        (["add", "recompute", "--into", "file"], "file is a file"),
        (["add", "recompute", "--into", "file/package"], "file is not a folder"),
        (["add", "recompute", "--into", "gone/package"], "gone is not a folder"),
        (["add", "recompute", "--into", "/"], "Python can't import a folder called ''"),
        (["add", "recompute", "--into", "root"], "root is a project's root, not a package in it"),
        (
            ["add", "recompute", "--into", "blocked"],
            "blocked/core is a file, and a folder must go there",
        ),
        (
            ["add", "recompute", "--into", "hole"],
            "core/lazy.py is a folder, and a file must go there",
        ),
        (["diff", "full"], "full has no curry-train.lock"),
        (["diff", "damaged"], "curry-train.lock is damaged"),
        (["diff", "hostile"], "names ../secret, which lies outside the project"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(
    bundle: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    place = tmp_path / "place"
    write(place / "full/notes.txt", "")
    write(place / "file", "")
    (place / "link").symlink_to(place / "full")
    write(place / "root/pyproject.toml", "")
    write(place / "blocked/core", "")
    write(place / "hole/core/lazy.py/notes.txt", "")
    write(place / "damaged/curry-train.lock", '{"bundle": 1}')
    record = {"../secret": {"sha256": "", "bundle": ""}}
    hostile = {
        "bundle": "",
        "project": None,
        "package": {"directory": "a", "name": "a"},
        "files": record,
    }
    write(place / "hostile/curry-train.lock", json.dumps(hostile))
    before = tree(tmp_path)
    refused = scaffold(bundle, *arguments, cwd=place)
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: ")
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert tree(tmp_path) == before


def test_new_does_not_replace_the_current_folder(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    refused = scaffold(bundle, "new", ".", cwd=tmp_path / "here")
    assert (refused.returncode, "is the current directory" in refused.stderr) == (2, True)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("arguments", [["new", "run"], ["add", "recompute", "--into", "package"]])
def test_a_place_that_takes_no_file_gets_one_line_and_keeps_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], number: int
) -> None:
    genuine = Path.open

    def refuse(self: Path, mode: str = "r", **options: Any) -> Any:
        if "x" in mode:
            raise OSError(number, os.strerror(number))
        return genuine(self, mode, **options)

    monkeypatch.setattr(command, "BUNDLE", bundle)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        result = CliRunner().invoke(command.main, arguments)
    assert result.exit_code == 2
    assert f"Error: {os.strerror(number)}: {tmp_path}" in result.output
    assert tree(tmp_path) == before


def test_lock_of_a_copied_bundle_does_not_depend_on_where_the_bundle_is(
    bundle: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(bundle, tmp_path / "other")
    scaffold(bundle, "new", "one", "--name", "run", cwd=tmp_path)
    scaffold(other, "new", "two", "--name", "run", cwd=tmp_path)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
