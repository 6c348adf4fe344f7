"""Tests of the three-way merge, and of what `update` does with each file.

Run: `python -m pytest tests/cli/test_scaffold_merge.py`.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaffold_case import edit, make_bundle, release, scaffold, shell, times, tree, write

from curry_train.cli.merge import (
    MIDDLE_MARKER,
    OURS_MARKER,
    THEIRS_MARKER,
    Chunk,
    merge_chunks,
    merge_texts,
    read_lock,
)
from curry_train.cli.ownership import Bundle

# Few distinct lines, so that the three texts have many lines in common, in any order.
LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "d\n", "\n", "\f\n"]), max_size=12)
ENDS = st.sampled_from(["", "end"])
TEXTS = st.builds(lambda lines, end: "".join(lines) + end, LINES, ENDS)


@given(TEXTS, TEXTS, TEXTS)
@settings(deadline=None, max_examples=300)
def test_all_three_texts_can_be_rebuilt_from_the_chunks(base: str, ours: str, theirs: str) -> None:
    """Check that no line of any side is dropped, doubled or moved."""
    chunks = merge_chunks(base, ours, theirs)
    assert "".join(line for chunk in chunks for line in chunk.base) == base
    assert "".join(line for chunk in chunks for line in chunk.ours) == ours
    assert "".join(line for chunk in chunks for line in chunk.theirs) == theirs


@given(TEXTS, TEXTS)
@settings(deadline=None)
def test_an_edit_of_one_side_and_an_identical_edit_of_both_are_taken(base: str, new: str) -> None:
    assert merge_texts(base, new, base) == (new, 0)
    assert merge_texts(base, base, new) == (new, 0)
    assert merge_texts(base, new, new) == (new, 0)


@given(TEXTS, TEXTS, TEXTS)
@settings(deadline=None, max_examples=300)
def test_the_two_sides_of_every_conflict_are_in_the_text(base: str, ours: str, theirs: str) -> None:
    """Resolve all conflicts for one side, and find the lines of that side."""
    text, conflicts = merge_texts(base, ours, theirs)
    assert text.count(f"{OURS_MARKER}\n") == conflicts
    for side in ("ours", "theirs"):
        wanted: list[str] = []
        for chunk in merge_chunks(base, ours, theirs):
            wanted += getattr(chunk, side) if chunk.is_conflict else chunk.merged()
        resolved = resolve(text, side)
        # A conflict ends the last line of a side that had no line end.
        assert [line.rstrip("\n") for line in resolved] == [line.rstrip("\n") for line in wanted]


@given(
    st.integers(3, 30).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.dictionaries(st.integers(0, size - 1), st.sampled_from(["edit", "drop", "more"])),
        )
    )
)
@settings(deadline=None, max_examples=200)
def test_edits_with_an_unchanged_line_between_merge(case: tuple[int, dict[int, str]]) -> None:
    """Edit separate lines, odd groups on one side and even ones on the other, without conflict."""
    size, edits = case
    lines = [f"line {number}\n" for number in range(size)]
    ours = list(lines)
    theirs = list(lines)
    both = list(lines)
    group = 0
    previous = -2
    for number in sorted(edits):
        if number > previous + 1:
            group += 1
        previous = number
        kind = edits[number]
        new = {"edit": "edited\n", "drop": "", "more": f"{lines[number]}added\n"}[kind]
        new = new.replace("ed\n", f"ed {number}\n")
        (ours if group % 2 else theirs)[number] = new
        both[number] = new
    merged = merge_texts("".join(lines), "".join(ours), "".join(theirs))
    assert merged == ("".join(both), 0)


@given(TEXTS, TEXTS, TEXTS)
@settings(deadline=None)
def test_a_merge_does_not_depend_on_which_side_is_ours(base: str, ours: str, theirs: str) -> None:
    text, conflicts = merge_texts(base, ours, theirs)
    turned, turned_conflicts = merge_texts(base, theirs, ours)
    assert conflicts == turned_conflicts
    if not conflicts:
        assert text == turned


def test_a_merge_agrees_with_git_on_an_example(tmp_path: Path) -> None:
    texts = {
        "ours": "head\na\nmine\nc\nd\ne\nf\n",
        "base": "a\nb\nc\nd\ne\nf\n",
        "theirs": "a\ntheirs\nc\nd\nE\nf\ntail\n",
    }
    for name, text in texts.items():
        write(tmp_path / name, text)
    command = ["git", "merge-file", "-p", "-L", "yours", "-L", "base", "-L", "curry-train"]
    git = subprocess.run([*command, *texts], cwd=tmp_path, capture_output=True, text=True)
    assert merge_texts(texts["base"], texts["ours"], texts["theirs"]) == (git.stdout, 1)


def test_a_conflict_has_both_sides_between_its_markers() -> None:
    text, conflicts = merge_texts("a\nb\nc\n", "mine\nb\nc\n", "theirs\nb\nc\n")
    assert conflicts == 1
    lines = [OURS_MARKER, "mine", MIDDLE_MARKER, "theirs", THEIRS_MARKER, "b", "c"]
    assert text.splitlines() == lines
    assert resolve(text, "ours") == ["mine\n", "b\n", "c\n"]


@pytest.mark.parametrize(
    "fault",
    [
        lambda chunk: list(chunk.ours),
        lambda chunk: list(chunk.theirs),
        lambda chunk: [*chunk.ours, *chunk.theirs],
    ],
    ids=["takes ours", "takes theirs", "appends"],
)
def test_a_merge_that_loses_an_edit_fails_the_properties(
    fault: Callable[[Chunk], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunk, "merged", fault)
    with pytest.raises(AssertionError):
        test_an_edit_of_one_side_and_an_identical_edit_of_both_are_taken.hypothesis.inner_test(
            "a\nb\n", "a\nc\n"
        )
    with pytest.raises(AssertionError):
        test_edits_with_an_unchanged_line_between_merge.hypothesis.inner_test(
            (4, {0: "edit", 2: "edit"})
        )


def resolve(text: str, side: str) -> list[str]:
    """Return the lines of a merged text with every conflict resolved for one side."""
    lines: list[str] = []
    inside = ""
    for line in text.split("\n"):
        if line == OURS_MARKER:
            inside = "ours"
        elif line == MIDDLE_MARKER and inside == "ours":
            inside = "theirs"
        elif line == THEIRS_MARKER and inside == "theirs":
            inside = ""
        elif inside in ("", side):
            lines.append(f"{line}\n")
    if lines[-1] == "\n":
        lines.pop()  # text after the last line end
    return lines


# update


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path / "bundle")


@pytest.fixture
def project(bundle: Bundle, tmp_path: Path) -> Path:
    scaffold(bundle, "new", "run", cwd=tmp_path)
    return tmp_path / "run"


def test_update_of_an_unchanged_release_changes_nothing(bundle: Bundle, project: Path) -> None:
    before = times(project)
    done = scaffold(bundle, "update", cwd=project)
    assert (done.returncode, times(project)) == (0, before)
    assert done.stdout.splitlines()[-1].startswith("Nothing to do: this release of curry-train is")


def test_update_handles_each_file_by_its_state(bundle: Bundle, project: Path) -> None:
    write(bundle.project / "gone.txt", "1\n")
    write(bundle.project / "gone_edited.txt", "1\n")
    write(bundle.project / "missing.txt", "1\n")
    scaffold(bundle, "update", cwd=project)
    release(bundle, "0.3.0")
    (project / "missing.txt").unlink()
    (bundle.project / "gone.txt").unlink()
    (bundle.project / "gone_edited.txt").unlink()
    write(project / "gone_edited.txt", "mine\n")
    write(bundle.project / "missing.txt", "2\n")
    write(bundle.project / "fresh.txt", "new\n")
    write(project / ".gitignore", "/runs/\n/mine/\n")
    edit(project / "train.py", "def main():", "def main():\n    print('mine')")
    edit(bundle.project / "train.py", '"""Train my_project."""', '"""Train my_project, faster."""')
    edit(bundle.project / "README.md", "Read train.py.", "Read train.py first.")

    planned = scaffold(bundle, "update", "--dry-run", cwd=project)
    done = scaffold(bundle, "update", cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    assert planned.stdout.replace("Dry run: would write", "Wrote") == done.stdout
    assert [line for line in done.stdout.splitlines()[:-1] if not line.startswith("same ")] == [
        "keep       .gitignore",
        "replace    README.md",
        "create     fresh.txt",
        "delete     gone.txt",
        "yours now  gone_edited.txt",
        "missing    missing.txt",
        "replace    pyproject.toml",
        "merge      train.py",
        "delete     wheels/curry_train-0.2.0-py3-none-any.whl",
        "create     wheels/curry_train-0.3.0-py3-none-any.whl",
        "replace    curry-train.lock",
    ]
    made = tree(project)
    assert b"/mine/" in made[".gitignore"]
    assert b"Read train.py first." in made["README.md"]
    assert b"print('mine')" in made["train.py"]
    assert b"Train run, faster." in made["train.py"]
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
    again = scaffold(bundle, "update", cwd=project)
    assert again.stdout.splitlines()[-1].startswith("Nothing to do")
    assert tree(project) == made
    shown = scaffold(bundle, "diff", cwd=project).stdout
    assert "edited           train.py" in shown


def test_update_marks_a_conflict_and_ends_with_1(bundle: Bundle, project: Path) -> None:
    edit(project / "README.md", "Read train.py.", "Read my notes.")
    edit(bundle.project / "README.md", "Read train.py.", "Read config.yaml.")
    edit(bundle.project / ".gitignore", "/runs/", "/runs/\n/build/")
    before = tree(project)
    planned = scaffold(bundle, "update", "--dry-run", cwd=project)
    assert (planned.returncode, tree(project)) == (1, before)
    done = scaffold(bundle, "update", cwd=project)
    assert done.returncode == 1
    assert "conflict   README.md" in done.stdout
    assert "1 file needs you" in done.stderr
    assert (project / "README.md").read_text() == (
        f"# run\n\n{OURS_MARKER}\nRead my notes.\n{MIDDLE_MARKER}\n"
        f"Read config.yaml.\n{THEIRS_MARKER}\n"
    )
    assert (project / ".gitignore").read_text() == "/runs/\n/build/\n"

    # It is still a conflict, and a newer release is refused, until it is resolved.
    again = scaffold(bundle, "update", cwd=project)
    assert (again.returncode, "conflict   README.md" in again.stdout) == (1, True)
    edit(bundle.project / "README.md", "# my_project", "# The project my_project")
    refused = scaffold(bundle, "update", cwd=project)
    assert refused.returncode == 2
    assert "README.md has an unresolved conflict" in refused.error
    write(project / "README.md", "# run\n\nRead my notes and config.yaml.\n")
    assert scaffold(bundle, "update", cwd=project).returncode == 0
    merged = (project / "README.md").read_text()
    assert merged == "# The project run\n\nRead my notes and config.yaml.\n"


def test_update_leaves_a_file_of_the_user_and_an_edited_wheel_in_the_way(
    bundle: Bundle, project: Path
) -> None:
    write(project / "data.py", "MINE = 1\n")
    (wheel,) = (project / "wheels").iterdir()
    wheel.write_bytes(b"\0mine")
    write(bundle.project / "data.py", "THEIRS = 1\n")
    write(bundle.package / "core/blocks.py", "NEWER = 1\n")
    done = scaffold(bundle, "update", cwd=project)
    assert done.returncode == 1
    assert "in the way data.py" in done.stdout
    assert f"in the way wheels/{wheel.name}" in done.stdout
    assert (project / "data.py").read_text() == "MINE = 1\n"
    assert wheel.read_bytes() == b"\0mine"
    lock = read_lock(project)
    assert lock is not None
    assert "data.py" not in lock.files
    (project / "data.py").unlink()
    wheel.unlink()
    assert scaffold(bundle, "update", cwd=project).returncode == 0
    assert (project / "data.py").read_text() == "THEIRS = 1\n"


def test_update_brings_an_added_technique_with_its_new_imports(
    bundle: Bundle, tmp_path: Path
) -> None:
    root = tmp_path / "repository"
    write(root / "setup.py", "")
    write(root / "mylib/__init__.py", "")
    scaffold(bundle, "add", "sac", "--into", root / "mylib/training", cwd=root)
    edit(
        root / "mylib/training/sac.py",
        "def remove_sac():\n    pass",
        "def remove_sac():\n    return 'mine'",
    )
    edit(
        bundle.package / "primitives/sac.py",
        "from ..core.blocks",
        "from ..core.measure import PEAK\nfrom ..core.blocks",
    )
    edit(
        bundle.package / "primitives/checkpointed.py",
        "return blocks",
        "blocks.PEAK = 1\n    return blocks",
    )
    done = scaffold(bundle, "update", cwd=root)
    assert (done.returncode, done.stderr) == (0, "")
    assert "create     mylib/training/measure.py" in done.stdout
    assert "merge      mylib/training/sac.py" in done.stdout
    text = (root / "mylib/training/sac.py").read_text()
    assert "from .measure import PEAK" in text
    assert "return 'mine'" in text
    ran = shell("python -m pytest -q tests/test_sac.py", cwd=root)
    assert "1 passed" in ran.stdout, ran.stdout


def test_update_of_an_owned_project_merges_its_rooms(bundle: Bundle, tmp_path: Path) -> None:
    scaffold(bundle, "new", "run", "--own", cwd=tmp_path)
    edit(tmp_path / "run/run/core/blocks.py", "return ['block']", "return ['block']  # mine")
    write(
        bundle.package / "core/blocks.py",
        "X = 1\n\n\n" + (bundle.package / "core/blocks.py").read_text(),
    )
    done = scaffold(bundle, "update", "run", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "run/run/core/blocks.py").read_text() == (
        "X = 1\n\n\ndef find_blocks():\n    return ['block']  # mine\n"
    )


def test_update_keeps_a_files_mode(bundle: Bundle, project: Path) -> None:
    (project / "train.py").chmod(0o755)
    edit(bundle.project / "train.py", "Train my_project.", "Train my_project now.")
    assert scaffold(bundle, "update", cwd=project).returncode == 0
    assert (project / "train.py").stat().st_mode & 0o777 == 0o755


def test_update_refuses_an_older_release(bundle: Bundle, project: Path) -> None:
    release(bundle, "0.10.0")
    assert scaffold(bundle, "update", cwd=project).returncode == 0
    release(bundle, "0.9.0")
    refused = scaffold(bundle, "update", cwd=project)
    assert refused.returncode == 2
    assert "is from curry-train 0.10.0, and this is 0.9.0" in refused.error
