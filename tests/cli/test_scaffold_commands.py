"""Tests of commands: states in `diff`, rows of `list`, one line for each mistake.

Run: `python -m pytest tests/cli/test_scaffold_commands.py`.
"""

import errno
import subprocess
from pathlib import Path

import pytest

from curry_train.cli.merge import Base, Lock
from curry_train.cli.ownership import TECHNIQUES

from .scaffold_case import REAL, edit, refusal, scaffold, tree, write


def test_a_dry_run_of_new_lists_the_files_and_writes_none(bundle):
    done = scaffold(bundle, "new run --dry-run")
    assert "train.py" in done.stdout
    assert "Next:" not in done.stdout
    assert not Path("run").exists()


def test_new_does_not_take_the_current_folder_though_it_is_empty(bundle):
    Path("here").mkdir()
    assert "name a new folder" in refusal(bundle, "new .", cwd="here")
    assert not [*Path("here").iterdir()]


def test_new_goes_on_in_the_folder_of_a_start_that_was_killed(bundle):
    write("run/.curry-train-staged-1/0", "")
    scaffold(bundle, "new run")
    assert not [*Path("run").glob(".curry-train-staged-*")]


def test_diff_tells_edits_of_the_user_from_changes_of_the_release(bundle, project):
    theirs = bundle.project
    write(theirs / "both.txt", "1\n2\n3\n")
    write(theirs / "gone.txt", "1\n")
    scaffold(bundle, "update")
    assert scaffold(bundle, "diff", project).stdout.endswith("7 files: 7 as it came\n")

    write(project / "README.md", "# Mine\n")
    write(project / "both.txt", "mine\n2\n3\n")
    write(theirs / "both.txt", "1\n2\ntheirs\n")
    write(theirs / "train.py", "print('newer')\n")
    write(project / ".gitignore", "the same\n")
    write(theirs / ".gitignore", "the same\n")
    write(theirs / "fresh.txt", "")
    (project / "pyproject.toml").unlink()
    (theirs / "gone.txt").unlink()

    done = scaffold(bundle, "diff")
    assert [line for line in done.stdout.splitlines() if not line.startswith("as it came ")] == [
        "edited           README.md",
        "both             both.txt",
        "new in bundle    fresh.txt",
        "gone from bundle gone.txt",
        "missing          pyproject.toml",
        "newer in bundle  train.py",
        "8 files: 2 as it came, 1 edited, 1 both, 1 new in bundle, 1 gone from bundle, 1",
        "  missing, 1 newer in bundle",
    ]


def test_diff_patch_turns_the_users_files_into_the_bundles(bundle, project):
    write(project / "README.md", "# Mine")
    (project / "pyproject.toml").unlink()
    edit(bundle.project / "train.py", "if __name__ == '__main__':\n    main()\n", "main()")
    shown = scaffold(bundle, "diff --patch").stdout
    assert "\n-# Mine\n\\ No newline at end of file\n+# run\n" in shown
    subprocess.run(["git", "apply", "-"], cwd=project, input=shown, text=True, check=True)
    assert scaffold(bundle, "diff").stdout.endswith("5 files: 5 as it came\n")


def test_list_has_every_technique_with_what_add_writes_in_80_columns():
    shown = scaffold(REAL, "list").stdout
    assert "primitives/grad_accum.py; add: 1 module, " in shown
    assert "plan/planner.py; add: prints the command" in shown
    assert "runs/attach.py; add: prints the lines; with --own " in shown
    lines = shown.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        technique.name for technique in TECHNIQUES
    ]
    assert max(map(len, lines)) <= 80


MISTAKES = """
new 1run                      | '1run' can't be a project's name
new run --name 'my run'       | give --name ASCII letters
new run --name torch          | something that the project needs itself
new full                      | full exists; name a new folder
new file                      | file exists; name a new folder
new gone/run                  | gone is not a folder
new . --name run              | exists; name a new folder
new LONG                      | File name too long
add Sacs --into package       | did you mean 'sac'?
add zzzz --into package       | there are memory-plan, sac, grad-accum, loss-spike
add sac                       | --into is missing
add memory-plan --own         | takes neither --own nor --overwrite
add sac --into my-package     | no package of yours can be called 'my-package'
add sac --into torch/sac      | no package of yours can be called 'torch'
add sac --into json           | no package of yours can be called 'json'
add sac --into m/sac          | m.py would be hidden by the folder m
add sac --into file           | file is a file, and a folder must go there
add sac --into root           | root is a project's root, not a package in it
add sac --into hole           | hole/sac.py is a folder, and a file must go there
diff full                     | full has no curry-train.lock
update full                   | full has no curry-train.lock
diff damaged                  | curry-train.lock is damaged
diff torn                     | curry-train.lock is damaged
update odd                    | curry-train.lock is damaged
diff hostile                  | hostile/../secret leads out of
"""


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_a_mistake_gets_one_line_and_status_2(bundle, tmp_path, row):
    line, _, message = row.partition("|")
    place = tmp_path / "place"
    for path in ("full/notes.txt", "file", "m.py", "root/pyproject.toml", "hole/sac.py/notes.txt"):
        write(place / path, "")
    write(place / "damaged/curry-train.lock", '{"format": 2')
    write(
        place / "odd/curry-train.lock",
        '{"version": 2, "package": null, "techniques": [], "files": {}}',
    )
    hostile = Lock("0", files={"../secret": Base("0", b"x")}).to_bytes()
    (write(place / "hostile/curry-train.lock", "")).write_bytes(hostile)
    torn = Lock("0", files={"a": Base("0", b"x" * 99)}).to_bytes().replace(b'"eN', b'"eX')
    (write(place / "torn/curry-train.lock", "")).write_bytes(torn)
    before = tree(tmp_path)
    refused = refusal(bundle, line.replace("LONG", "x" * 300), cwd=place)
    assert refused.startswith("Error: ")
    assert message.strip() in refused
    assert tree(tmp_path) == before


@pytest.mark.parametrize("writes", [0, 1])
@pytest.mark.parametrize("line", ["new other", "add sac --into package", "update run"])
def test_an_unwritable_folder_gets_one_line_and_no_files(
    bundle, tmp_path, monkeypatch, line, writes
):
    scaffold(bundle, "new run")
    write(bundle.package / "core/blocks.py", "def find_blocks():\n    return ['newer']\n")
    edit(bundle.project / "train.py", "Train a model.", "Train a model, faster.")
    genuine = Path.write_bytes
    count = 0

    def refuse(self, content):
        nonlocal count
        count += 1
        if count > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return genuine(self, content)

    before = tree(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", refuse)
        message = refusal(bundle, line)
    assert message.startswith(f"Error: {tmp_path}")
    assert message.endswith(": No space left on device")
    assert tree(tmp_path) == before
