"""Tests of what `update` does with each file.

Run: `python -m pytest tests/cli/test_scaffold_merge.py`.
"""

import shutil
from pathlib import Path

import pytest

from curry_train.cli.merge import OURS_MARKER, read_lock

from .scaffold_case import edit, refusal, release, scaffold, shell, tree, write


def test_update_handles_each_file_by_its_state(bundle, project):
    for name in ("gone", "gone_edited", "missing"):
        write(bundle.project / f"{name}.txt", "1\n")
    scaffold(bundle, "update")
    bundle = release(bundle, "0.3.0")
    theirs = bundle.project
    (project / "missing.txt").unlink()
    (theirs / "gone.txt").unlink()
    (theirs / "gone_edited.txt").unlink()
    write(project / "gone_edited.txt", "mine\n")
    write(theirs / "missing.txt", "2\n")
    write(theirs / "fresh.txt", "new\n")
    write(project / ".gitignore", "/runs/\n/mine/\n")
    edit(project / "train.py", "def main():", "def main():\n    print('mine')")
    edit(theirs / "train.py", '"""Train a model."""', '"""Train a model, faster."""')
    edit(theirs / "README.md.jinja", "Read train.py.", "Read train.py first.")

    planned = scaffold(bundle, "update --dry-run")
    done = scaffold(bundle, "update")
    assert done.stderr == ""
    assert planned.stdout.replace("Dry run: would write", "Wrote") == done.stdout
    assert [line for line in done.stdout.splitlines()[:-1] if not line.startswith("same ")] == [
        "delete     wheels/curry_train-0.2.0-py3-none-any.whl",
        "create     wheels/curry_train-0.3.0-py3-none-any.whl",
        "keep       .gitignore",
        "replace    README.md",
        "create     fresh.txt",
        "delete     gone.txt",
        "yours now  gone_edited.txt",
        "missing    missing.txt",
        "replace    pyproject.toml",
        "merge      train.py",
        "replace    curry-train.lock",
    ]
    made = tree(project)
    assert b"/mine/" in made[".gitignore"]
    assert b"Read train.py first." in made["README.md"]
    assert b"print('mine')" in made["train.py"]
    assert b"Train a model, faster." in made["train.py"]
    assert made["gone_edited.txt"] == b"mine\n"
    assert not {"gone.txt", "missing.txt"} & set(made)
    assert b'"curry-train==0.3.0"' in made["pyproject.toml"]

    lock = read_lock(project)
    assert lock is not None
    assert lock.version == "0.3.0"
    assert lock.files["train.py"].version == "0.3.0"
    assert lock.files[".gitignore"].version == "0.2.0"
    assert not {"gone.txt", "gone_edited.txt"} & set(lock.files)
    # A second update has nothing to merge, and the user's edits are still edits.
    assert scaffold(bundle, "update").stdout.splitlines()[-1].startswith("Nothing to do")
    assert tree(project) == made
    assert "edited           train.py" in scaffold(bundle, "diff").stdout


def test_update_marks_a_conflict_and_ends_with_1(bundle, project):
    edit(project / "README.md", "Read train.py.", "Read my notes.")
    edit(bundle.project / "README.md.jinja", "Read train.py.", "Read config.yaml.")
    edit(bundle.project / ".gitignore", "/runs/", "/runs/\n/build/")
    before = tree(project)
    scaffold(bundle, "update --dry-run", status=1)
    assert tree(project) == before
    for _ in range(2):  # it is a conflict until it is resolved
        done = scaffold(bundle, "update", status=1)
        assert "conflict   README.md" in done.stdout
    assert done.stderr == "1 file to resolve: look between <<<<<<< and >>>>>>>\n"
    assert (project / "README.md").read_text() == (
        f"# run\n\n{OURS_MARKER}\nRead my notes.\n=======\nRead config.yaml.\n>>>>>>> curry-train\n"
    )
    assert (project / ".gitignore").read_text() == "/runs/\n/build/\n"

    # A newer release is refused until it is resolved.
    edit(bundle.project / "README.md.jinja", "# {{ name }}", "# The project {{ name }}")
    assert "README.md has an unresolved conflict" in refusal(bundle, "update")
    write(project / "README.md", "# run\n\nRead my notes and config.yaml.\n")
    scaffold(bundle, "update")
    merged = (project / "README.md").read_text()
    assert merged == "# The project run\n\nRead my notes and config.yaml.\n"


def test_update_brings_what_several_calls_added_with_its_new_imports(bundle):
    root = Path("repository")
    write(root / "setup.py", "")
    write(root / "mylib/__init__.py", "")
    for technique in ("grad-accum", "sac"):
        scaffold(bundle, f"add {technique} --into mylib/training", cwd=root)
    edit(bundle.package / "primitives/grad_accum.py", "return 4", "return 'newer'")
    edit(
        root / "mylib/training/sac.py",
        "def remove_sac():\n    pass",
        "def remove_sac():\n    return 'mine'",
    )
    edit(
        bundle.package / "primitives/sac.py",
        "from ..core.blocks import (",
        "from ..core.measure import PEAK\nfrom ..core.blocks import (",
    )
    edit(
        bundle.package / "primitives/checkpointed.py",
        "return find",
        "find_blocks.peak = 1\n    return find",
    )
    done = scaffold(bundle, "update", cwd=root)
    assert done.stderr == ""
    assert "create     mylib/training/measure.py" in done.stdout
    assert "merge      mylib/training/sac.py" in done.stdout
    assert "return 'newer'" in (root / "mylib/training/grad_accum.py").read_text()
    text = (root / "mylib/training/sac.py").read_text()
    assert "from .measure import PEAK" in text
    assert "return 'mine'" in text
    ran = shell("python -m pytest -q tests/test_sac.py", cwd=root)
    assert "1 passed" in ran.stdout, ran.stdout


def test_update_refuses_an_older_release(bundle, project):
    bundle = release(bundle, "0.10.0")
    scaffold(bundle, "update")
    bundle = release(bundle, "0.9.0")
    assert "is from curry-train 0.10.0, and this is 0.9.0" in refusal(bundle, "update")


@pytest.fixture
def conflicting(bundle, project):
    """Edit a project and its release: a merge, a conflict, a file to delete and one to create."""
    write(bundle.project / "gone.txt", "1\n")
    scaffold(bundle, "update")
    (bundle.project / "gone.txt").unlink()
    write(bundle.project / "tests/fresh.txt", "new\n")
    edit(project / "train.py", "def main():", "def main():\n    print('mine')")
    edit(bundle.project / "train.py", "Train a model.", "Train a model, faster.")
    edit(project / "README.md", "Read train.py.", "Read my notes.")
    edit(bundle.project / "README.md.jinja", "Read train.py.", "Read config.yaml.")
    return project


@pytest.mark.parametrize("written", [0, 2])
def test_update_that_was_killed_between_two_files_is_completed_by_running_it_again(
    bundle, conflicting, tmp_path, monkeypatch, written
):
    reference = Path(shutil.copytree(conflicting, tmp_path / "reference"))
    scaffold(bundle, "update", cwd=reference, status=1)
    replace = Path.replace
    left = written

    def killed(self, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return replace(self, target)

    write(conflicting / ".curry-train-staged-1/0", "of an update that was killed before")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        scaffold(bundle, "update", status=130)
    assert tree(conflicting) != tree(reference)
    if written:
        # The conflict is written already; git gives the file back as it was.
        assert "unresolved conflict" in refusal(bundle, "update")
        write(conflicting / "README.md", "# run\n\nRead my notes.\n")
    scaffold(bundle, "update", status=1)
    assert tree(conflicting) == tree(reference)


def test_update_without_git_refuses_a_merge_before_it_writes(bundle, conflicting, monkeypatch):
    before = tree(conflicting)
    monkeypatch.setenv("PATH", str(conflicting))
    assert "needs git" in refusal(bundle, "update")
    assert tree(conflicting) == before


def test_update_keeps_the_line_ends_and_the_encoding_of_an_edited_file(bundle, project):
    theirs = bundle.project / "notes.txt"
    mine = project / "notes.txt"
    write(theirs, "1\n2\n3\n4")
    scaffold(bundle, "update")
    mine.write_bytes(b"\xe9\r\n2\r\n3\r\n4")
    write(theirs, "1\n2\n3\nfour")
    scaffold(bundle, "update")
    assert mine.read_bytes() == b"\xe9\r\n2\r\n3\r\nfour"
