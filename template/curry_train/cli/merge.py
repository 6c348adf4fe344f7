"""Compare a project with what it was copied from, merge by git, and write it file by file.

`curry-train.lock` names each copied file's version and holds its text compressed: this base makes a
three-way merge possible without a network.

Files are staged in one folder first and then replaced, the lock last. Where a project is tracked
by git, git restores what it had before.

Proof: `python -m pytest tests/cli/test_scaffold_merge.py`.
"""

import base64
import json
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from .ownership import ScaffoldError
from .screen import write_output

LOCK_NAME = "curry-train.lock"
STAGING_FOLDER = ".curry-train-staging"

# Git's markers around lines that both sides changed.
OURS_MARKER = "<<<<<<< yours"
THEIRS_MARKER = ">>>>>>> curry-train"
MOST_CONFLICTS = 127  # the highest exit status of `git merge-file` that is a number of conflicts


# The lock


@dataclass(frozen=True)
class Base:
    """The content that a file was copied with, and the version that it is from."""

    version: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Lock:
    """Everything that was copied into a project.

    `project` is None where techniques were added to a repository that `new` did not make.
    `directory` and `package` are
    where techniques are, and how Python imports them.
    """

    version: str
    project: str | None = None
    own: bool = False
    directory: str | None = None
    package: str | None = None
    techniques: tuple[str, ...] = ()
    files: Mapping[str, Base] = field(default_factory=dict, repr=False)

    def to_bytes(self) -> bytes:
        """Return the lock as JSON."""
        files = {
            path: [base.version, base64.b64encode(zlib.compress(base.content, 9)).decode()]
            for path, base in sorted(self.files.items())
        }
        return (json.dumps(vars(self) | {"files": files}, indent=1) + "\n").encode()


def read_lock(root: Path) -> Lock | None:
    """Read the lock of the project at `root`; return None where there is none."""
    path = root / LOCK_NAME
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        files = {
            name: Base(version, zlib.decompress(base64.b64decode(packed, validate=True)))
            for name, (version, packed) in document.pop("files").items()
        }
        return Lock(**document | {"techniques": tuple(document["techniques"]), "files": files})
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise ScaffoldError(
            f"{path} is damaged ({error}); take it back from version control, or delete it"
        ) from error


# Plan of the files that a command writes


class FileState(StrEnum):
    """A copied file compared with its base and with the bundle."""

    SAME = "as it came"
    EDITED = "edited"
    NEWER = "newer in bundle"
    BOTH = "both"
    MISSING = "missing"
    GONE = "gone from bundle"
    NEW = "new in bundle"
    FOREIGN = "yours"


@dataclass(frozen=True)
class Comparison:
    """One file: its state, and its content in the project and in the bundle."""

    path: str
    state: FileState
    base: Base | None = None
    yours: bytes | None = field(default=None, repr=False)
    wanted: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Change:
    """One file of a plan; `before` and `after` are None where the file does not exist."""

    path: str
    action: str
    before: bytes | None = field(repr=False)
    after: bytes | None = field(repr=False)

    @property
    def is_conflict(self) -> bool:
        """Return whether the user has to settle this file."""
        return self.action in ("conflict", "in the way")


@dataclass(frozen=True)
class WritePlan:
    """All changes of one command; the lock is the last."""

    root: Path
    changes: tuple[Change, ...]

    @property
    def writes(self) -> list[Change]:
        """Return the changes that write something."""
        return [change for change in self.changes if change.before != change.after]


def compare_files(root: Path, lock: Lock, wanted: Mapping[str, bytes]) -> list[Comparison]:
    """Compare every file that the lock records or the bundle would write now."""
    compared = []
    for path in sorted({*lock.files, *wanted}):
        place = destination(root, path)
        yours = place.read_bytes() if place.exists() else None
        base = lock.files.get(path)
        state = _state(None if base is None else base.content, yours, wanted.get(path))
        compared.append(Comparison(path, state, base, yours, wanted.get(path)))
    return compared


def _state(base: bytes | None, yours: bytes | None, wanted: bytes | None) -> FileState:
    if wanted is None:
        return FileState.GONE
    if yours is None:
        return FileState.NEW if base is None else FileState.MISSING
    if yours == wanted:
        return FileState.SAME
    if base is None:
        return FileState.FOREIGN
    if yours == base:
        return FileState.NEWER
    return FileState.EDITED if wanted == base else FileState.BOTH


def make_plan(
    root: Path,
    lock: Lock,
    compared: Sequence[Comparison],
    decide: Callable[[Comparison], Change],
    *,
    more: Sequence[Change] = (),
) -> WritePlan:
    """Plan the files that were compared, and the lock that names them."""
    files = dict(lock.files)
    changes = list(more)
    for entry in compared:
        change = decide(entry)
        changes.append(change)
        if change.action in ("delete", "yours now"):
            files.pop(entry.path, None)
        elif entry.wanted is None or change.action in ("missing", "in the way"):
            continue
        # A base that is the same keeps its version, so that locks differ only where files do.
        elif entry.base is None or entry.base.content != entry.wanted:
            files[entry.path] = Base(lock.version, entry.wanted)
    place = destination(root, LOCK_NAME)
    before = place.read_bytes() if place.exists() else None
    after = replace(lock, files=files).to_bytes()
    action = "create" if before is None else "replace"
    changes.append(Change(LOCK_NAME, "same" if before == after else action, before, after))
    return WritePlan(root, tuple(changes))


def destination(root: Path, path: str) -> Path:
    """Return where `path` lies once links are followed; refuse a place outside `root`."""
    place = (root / path).resolve()
    if not place.is_relative_to(root.resolve()):
        raise ScaffoldError(f"{root / path} leads out of {root} to {place}; remove that link first")
    folder = next(folder for folder in place.parents if folder.exists())
    if not folder.is_dir():
        raise ScaffoldError(f"{folder} is a file, and a folder must go there; move it away first")
    if place.is_dir():
        raise ScaffoldError(f"{place} is a folder, and a file must go there; move it away first")
    return place


def copied(entry: Comparison, *, overwrite: bool = False) -> Change:
    """Write a wanted file; one that differs is a conflict, or replaced."""
    action = "replace" if overwrite else "conflict"
    if entry.yours is None:
        action = "create"
    elif entry.state is FileState.SAME:
        action = "same"
    return Change(entry.path, action, entry.yours, entry.wanted)


def updated(entry: Comparison) -> Change:
    """Bring a file to the bundle's version and keep every edit."""
    is_edited = entry.yours is not None and (
        entry.base is None or entry.yours != entry.base.content
    )
    match entry.state:
        case FileState.NEW:
            return Change(entry.path, "create", None, entry.wanted)
        case FileState.NEWER:
            return Change(entry.path, "replace", entry.yours, entry.wanted)
        case FileState.BOTH:
            return _merged(entry)
        case FileState.GONE if not is_edited:
            return Change(entry.path, "delete", entry.yours, None)
    actions = {
        FileState.SAME: "same",
        FileState.EDITED: "conflict" if _has_conflict(entry.yours) else "keep",
        FileState.MISSING: "missing",
        FileState.GONE: "yours now",
        FileState.FOREIGN: "in the way",
    }
    return Change(entry.path, actions[entry.state], entry.yours, entry.yours)


def _has_conflict(content: bytes | None) -> bool:
    """Check for a conflict that an earlier update marked and nobody resolved."""
    lines = (content or b"").splitlines()
    return OURS_MARKER.encode() in lines and THEIRS_MARKER.encode() in lines


def _merged(entry: Comparison) -> Change:
    """Merge both edits of a file by git; conflicts are marked in the text."""
    if _has_conflict(entry.yours):
        raise ScaffoldError(
            f"{entry.path} has an unresolved conflict from an earlier update; "
            f"resolve it first: look for {OURS_MARKER!r}"
        )
    base = entry.base.content if entry.base else b""
    sides = {"yours": entry.yours or b"", "base": base, "curry-train": entry.wanted or b""}
    labels = [word for label in sides for word in ("-L", label)]
    with tempfile.TemporaryDirectory() as folder:
        for label, content in sides.items():
            Path(folder, label).write_bytes(content)
        try:
            done = subprocess.run(
                ["git", "merge-file", "-p", *labels, *sides], cwd=folder, capture_output=True
            )
        except FileNotFoundError as error:
            raise ScaffoldError("merging your edits needs git; install it first") from error
    if done.returncode > MOST_CONFLICTS:
        raise ScaffoldError(f"git can't merge {entry.path}: {done.stderr.decode().strip()}")
    return Change(entry.path, "conflict" if done.returncode else "merge", entry.yours, done.stdout)


# Writing


def write_project(plan: WritePlan) -> None:
    """Write a new project whole, or nothing: a folder next to its place is renamed."""
    folder = plan.root.with_name(f".{plan.root.name}{STAGING_FOLDER}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        write_changes(replace(plan, root=folder))
        folder.replace(plan.root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_changes(plan: WritePlan) -> None:
    """Stage all files of a plan, then replace them one by one, the lock last.

    After a kill in between, the same command writes the rest: each file holds its old content or
    its new one.
    """
    if not plan.writes:
        return
    staging = plan.root / STAGING_FOLDER
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        for number, change in enumerate(plan.writes):
            if change.after is not None:
                write_output(staging / str(number), change.after)
        for number, change in enumerate(plan.writes):
            place = destination(plan.root, change.path)
            if change.after is None:
                place.unlink(missing_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                shutil.copymode(place, staging / str(number))
            (staging / str(number)).replace(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
