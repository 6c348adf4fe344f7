"""Compare a project with what it was copied from, merge by git, and write it file by file.

`curry-train.lock` names each copied file's origin, version and hash, and holds its text
compressed: this base makes a three-way merge possible without a network.

Files are staged in one folder first and then replaced, the lock last. Where a project is tracked
by git, git restores what it had before.

Proof: `python -m pytest tests/cli/test_scaffold_merge.py`.
"""

import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from .ownership import ScaffoldError, SourceFile

LOCK_NAME = "curry-train.lock"
LOCK_FORMAT = 2
STAGING_FOLDER = ".curry-train-staging"

# What git writes around the lines that both sides changed.
OURS_MARKER = "<<<<<<< yours"
THEIRS_MARKER = ">>>>>>> curry-train"
MOST_CONFLICTS = 127  # the highest exit status of `git merge-file` that is a number of conflicts


# The lock


@dataclass(frozen=True)
class Record:
    """One copied file: its origin, the version that it came from, its hash and its text.

    `base` is None for a file that is not text.
    """

    source: str
    version: str
    sha256: str
    base: bytes | None = field(repr=False)


@dataclass(frozen=True)
class Lock:
    """Everything that was copied into a project.

    `project` is None where techniques were added to a repository that `new` did not make.
    `wheel` is the hash of the sources that its wheel was built from. `directory` and `package` are
    where techniques are, and how Python imports them.
    """

    version: str
    project: str | None = None
    own: bool = False
    wheel: str | None = None
    directory: str | None = None
    package: str | None = None
    techniques: tuple[str, ...] = ()
    files: Mapping[str, Record] = field(default_factory=dict, repr=False)

    def to_bytes(self) -> bytes:
        """Return the lock as JSON with a line for each file."""
        head = {"format": LOCK_FORMAT} | {
            name: value for name, value in vars(self).items() if name != "files"
        }
        lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        rows = [
            f"  {json.dumps(path)}: {json.dumps(_record_fields(record))}"
            for path, record in sorted(self.files.items())
        ]
        return "\n".join(["{", *lines, ' "files": {', ",\n".join(rows), " }", "}", ""]).encode()


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def record_of(file: SourceFile, version: str) -> Record:
    """Record a file that is copied from `version`."""
    base = file.content if _is_text(file.content) else None
    return Record(file.source, version, digest(file.content), base)


def read_lock(root: Path) -> Lock | None:
    """Read the lock of the project at `root`; return None where there is none."""
    path = root / LOCK_NAME
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != LOCK_FORMAT:
            raise ValueError(f"format {document['format']!r}, and this curry-train reads 2")
        files = {name: _read_record(row) for name, row in document["files"].items()}
        lock = Lock(
            _typed(document["version"], str),
            _typed(document["project"], str | None),
            _typed(document["own"], bool),
            _typed(document["wheel"], str | None),
            _typed(document["directory"], str | None),
            _typed(document["package"], str | None),
            tuple(_typed(name, str) for name in document["techniques"]),
            files,
        )
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise ScaffoldError(
            f"{path} is damaged ({error}); take it back from version control, or delete it"
        ) from error
    for name in (lock.directory or "", *lock.files):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ScaffoldError(
                f"{path} names {name}, which lies outside the project; take it back or delete it"
            )
    return lock


def _record_fields(record: Record) -> dict[str, str | None]:
    packed = None
    if record.base is not None:
        packed = base64.b64encode(zlib.compress(record.base, 9)).decode()
    return vars(record) | {"base": packed}


def _read_record(row: Mapping[str, Any]) -> Record:
    base = None
    if row["base"] is not None:
        base = zlib.decompress(base64.b64decode(row["base"], validate=True))
        if digest(base) != row["sha256"]:
            raise ValueError("a base does not have its recorded hash")
    source = _typed(row["source"], str)
    return Record(source, _typed(row["version"], str), _typed(row["sha256"], str), base)


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not {kind}")
    return value


def _is_text(content: bytes) -> bool:
    """Return whether git merges the content instead of taking it for binary."""
    return b"\0" not in content


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
    record: Record | None
    yours: bytes | None = field(repr=False)
    wanted: SourceFile | None = field(repr=False)


@dataclass(frozen=True)
class Change:
    """One file of a plan; `before` and `after` are None where the file does not exist."""

    path: str
    action: str
    before: bytes | None = field(repr=False)
    after: bytes | None = field(repr=False)

    @property
    def writes(self) -> bool:
        """Return whether the plan changes this file."""
        return self.before != self.after


@dataclass(frozen=True)
class WritePlan:
    """All changes of one command; the lock is the last."""

    root: Path
    changes: tuple[Change, ...]
    conflicts: int = 0

    @property
    def writes(self) -> list[Change]:
        """Return the changes that write something."""
        return [change for change in self.changes if change.writes]


def compare_files(
    root: Path, lock: Lock | None, wanted: Mapping[str, SourceFile]
) -> list[Comparison]:
    """Compare every file that the lock records or the bundle would write now."""
    records = lock.files if lock else {}
    compared = []
    for path in sorted({*records, *wanted}):
        place = destination(root, path)
        yours = place.read_bytes() if place.exists() else None
        record = records.get(path)
        state = _state(record, yours, wanted.get(path))
        compared.append(Comparison(path, state, record, yours, wanted.get(path)))
    return compared


def _state(record: Record | None, yours: bytes | None, wanted: SourceFile | None) -> FileState:
    if wanted is None:
        return FileState.GONE
    if yours is None:
        return FileState.MISSING if record else FileState.NEW
    if yours == wanted.content:
        return FileState.SAME
    if record is None:
        return FileState.FOREIGN
    if digest(yours) == record.sha256:
        return FileState.NEWER
    return FileState.EDITED if digest(wanted.content) == record.sha256 else FileState.BOTH


def plan_update(
    root: Path, lock: Lock, compared: Sequence[Comparison], *, more: Sequence[Change] = ()
) -> WritePlan:
    """Plan what brings a project to the bundle's version and keeps every edit."""
    records = {}
    changes = list(more)
    conflicts = 0
    for comparison in compared:
        change = _updated(comparison)
        changes.append(change)
        conflicts += change.action in ("conflict", "in the way")
        record = comparison.record
        if comparison.wanted and change.action not in ("missing", "in the way"):
            record = _fresh_record(record, comparison.wanted, lock.version)
        if record and change.action not in ("delete", "yours now"):
            records[comparison.path] = record
    changes.append(_lock_change(root, replace(lock, files=records)))
    return WritePlan(root, tuple(changes), conflicts)


def plan_copy(
    root: Path,
    lock: Lock,
    compared: Sequence[Comparison],
    *,
    overwrite: bool = False,
    more: Sequence[Change] = (),
) -> WritePlan:
    """Plan what writes the wanted files; those that differ are conflicts, or replaced."""
    records = dict(lock.files)
    changes = list(more)
    conflicts = 0
    for comparison in compared:
        if comparison.wanted is None:
            continue
        wanted = comparison.wanted.content
        action = "replace"
        if comparison.yours is None:
            action = "create"
        elif comparison.state is FileState.SAME:
            action = "same"
        elif not overwrite:
            action = "conflict"
            conflicts += 1
        changes.append(Change(comparison.path, action, comparison.yours, wanted))
        records[comparison.path] = _fresh_record(comparison.record, comparison.wanted, lock.version)
    changes.append(_lock_change(root, replace(lock, files=records)))
    return WritePlan(root, tuple(changes), conflicts)


def destination(root: Path, path: str) -> Path:
    """Return where `path` lies once links are followed; refuse a place outside `root`."""
    place = (root / path).resolve()
    if not place.is_relative_to(root.resolve()):
        raise ScaffoldError(f"{root / path} leads out of {root} to {place}; remove that link first")
    for folder in place.parents:
        if folder.is_dir():
            break
        if folder.exists():
            raise ScaffoldError(
                f"{folder} is a file, and a folder must go there; move it away first"
            )
    if place.is_dir():
        raise ScaffoldError(f"{place} is a folder, and a file must go there; move it away first")
    return place


def _updated(comparison: Comparison) -> Change:
    path = comparison.path
    yours = comparison.yours
    theirs = comparison.wanted.content if comparison.wanted else None
    match comparison.state:
        case FileState.NEW:
            return Change(path, "create", yours, theirs)
        case FileState.NEWER:
            return Change(path, "replace", yours, theirs)
        case FileState.BOTH:
            return _merged(comparison)
        case FileState.EDITED if _has_conflict(yours):
            return Change(path, "conflict", yours, yours)
        case FileState.GONE:
            edited = yours is not None and digest(yours) != getattr(comparison.record, "sha256", "")
            return (
                Change(path, "yours now", yours, yours)
                if edited
                else Change(path, "delete", yours, None)
            )
    actions = {
        FileState.SAME: "same",
        FileState.EDITED: "keep",
        FileState.MISSING: "missing",
        FileState.FOREIGN: "in the way",
    }
    return Change(path, actions[comparison.state], yours, yours)


def _has_conflict(content: bytes | None) -> bool:
    """Check for a conflict that an earlier update marked and nobody resolved."""
    lines = (content or b"").splitlines()
    return OURS_MARKER.encode() in lines and THEIRS_MARKER.encode() in lines


def _merged(comparison: Comparison) -> Change:
    assert comparison.yours is not None
    assert comparison.wanted is not None
    base = comparison.record.base if comparison.record else None
    if base is None or not all(map(_is_text, (comparison.yours, comparison.wanted.content))):
        return Change(comparison.path, "in the way", comparison.yours, comparison.yours)
    if _has_conflict(comparison.yours):
        raise ScaffoldError(
            f"{comparison.path} has an unresolved conflict from an earlier update; "
            f"resolve it first: look for {OURS_MARKER!r}"
        )
    merged, conflicts = _merge_by_git(base, comparison.yours, comparison.wanted.content)
    return Change(comparison.path, "conflict" if conflicts else "merge", comparison.yours, merged)


def _merge_by_git(base: bytes, yours: bytes, theirs: bytes) -> tuple[bytes, int]:
    """Merge two edits of `base`; return the text, with markers, and its number of conflicts."""
    command = ["git", "merge-file", "-p"]
    with tempfile.TemporaryDirectory() as folder:
        for label, content in (("yours", yours), ("base", base), ("curry-train", theirs)):
            Path(folder, label).write_bytes(content)
            command += ["-L", label]
        command += ["yours", "base", "curry-train"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        except FileNotFoundError as error:
            raise ScaffoldError("merging your edits needs git; install it first") from error
    if done.returncode > MOST_CONFLICTS:
        raise ScaffoldError(f"git merge-file failed: {done.stderr.decode().strip()}")
    return done.stdout, done.returncode


def _fresh_record(record: Record | None, wanted: SourceFile, version: str) -> Record:
    """Keep a record whose content is unchanged, so that locks differ only where files do."""
    if record is not None and record.sha256 == digest(wanted.content):
        return record
    return record_of(wanted, version)


def _lock_change(root: Path, lock: Lock) -> Change:
    place = destination(root, LOCK_NAME)
    before = place.read_bytes() if place.exists() else None
    after = lock.to_bytes()
    action = "create" if before is None else "replace"
    return Change(LOCK_NAME, "same" if before == after else action, before, after)


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
                write_file(staging / str(number), change.after)
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


@contextlib.contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Hold a project against other commands that write; the end of the process releases it."""
    try:
        import fcntl
    except ImportError:
        # Windows has no fcntl.
        yield
        return
    if not root.is_dir():
        yield
        return
    folder = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ScaffoldError(
                f"another add or update is writing to {root}; run this again when it has ended"
            ) from error
        yield
    finally:
        os.close(folder)


def write_file(place: Path, content: bytes) -> None:
    """Write a file; an error names it, which that of a full disk does not."""
    try:
        place.write_bytes(content)
    except OSError as error:
        error.filename = error.filename or str(place)
        raise
