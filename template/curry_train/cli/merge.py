"""Compare a project with what it was copied from, merge three ways, and write it atomically.

`curry-train.lock` names each copied file's origin, version and hash, and holds its text
compressed: this base makes a three-way merge possible without a network.

A write is staged in one folder, committed by renaming that folder, and applied file by file. A
write that was killed is rolled back before the commit and completed after it.

Why so long: the plan, the lock that it updates and the recovery of its write are one protocol.

Proof: `python -m pytest tests/cli/test_scaffold_merge.py tests/cli/test_scaffold_kill.py`.
"""

import base64
import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

from .ownership import ScaffoldError, SourceFile

LOCK_NAME = "curry-train.lock"
LOCK_FORMAT = 2
PENDING_FOLDER = ".curry-train.pending"
LEFTOVER_PATTERN = re.compile(r"\..+\.curry-train-(\d{1,9})")  # .<name>.curry-train-<process id>

OURS_MARKER = "<<<<<<< yours"
MIDDLE_MARKER = "======="
THEIRS_MARKER = ">>>>>>> curry-train"


# The lock


@dataclass(frozen=True)
class Record:
    """One copied file: its origin, the version that it came from, its hash and its text.

    `base` is None for a file that is not text, such as the wheel.
    """

    source: str
    version: str
    sha256: str
    base: bytes | None = field(repr=False)


@dataclass(frozen=True)
class Lock:
    """Everything that was copied into a project.

    `project` is None where techniques were added to a repository that `new` did not make.
    `directory` and `package` are where techniques are, and how Python imports them.
    """

    version: str
    project: str | None = None
    own: bool = False
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
    base = file.content if _text_of(file.content) is not None else None
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


def _text_of(content: bytes) -> str | None:
    if b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


# The three-way merge


@dataclass(frozen=True)
class Chunk:
    """Lines of the base with what each side made of them.

    The chunks of a merge, in order, give back each of the three texts.
    """

    base: Sequence[str]
    ours: Sequence[str]
    theirs: Sequence[str]

    @property
    def is_conflict(self) -> bool:
        """Return whether both sides changed these lines, in different ways."""
        return self.ours != self.theirs and self.base not in (self.ours, self.theirs)

    def merged(self) -> list[str]:
        """Return the merged lines, with markers around a conflict."""
        if not self.is_conflict:
            return list(self.theirs if self.ours == self.base else self.ours)
        return [
            f"{OURS_MARKER}\n",
            *_ended(self.ours),
            f"{MIDDLE_MARKER}\n",
            *_ended(self.theirs),
            f"{THEIRS_MARKER}\n",
        ]


def merge_chunks(base: str, ours: str, theirs: str) -> list[Chunk]:
    """Cut three texts into chunks at the lines that all three have in common (diff3)."""
    base_lines = _lines(base)
    our_lines = _lines(ours)
    their_lines = _lines(theirs)
    chunks = []
    base_end = 0
    our_end = 0
    their_end = 0
    for base_start, our_start, their_start, length in _common_runs(
        base_lines, our_lines, their_lines
    ):
        changed = Chunk(
            base_lines[base_end:base_start],
            our_lines[our_end:our_start],
            their_lines[their_end:their_start],
        )
        if changed.base or changed.ours or changed.theirs:
            chunks.append(changed)
        base_end = base_start + length
        our_end = our_start + length
        their_end = their_start + length
        if length:
            same = base_lines[base_start:base_end]
            chunks.append(Chunk(same, same, same))
    return chunks


def merge_texts(base: str, ours: str, theirs: str) -> tuple[str, int]:
    """Merge two edits of `base`; return the text and its number of conflicts."""
    chunks = merge_chunks(base, ours, theirs)
    lines: list[str] = []
    for chunk in chunks:
        if lines and not lines[-1].endswith("\n"):
            # A side dropped the last line's end, and the other side goes on after it.
            lines[-1] += "\n" if chunk.merged() else ""
        lines += chunk.merged()
    return "".join(lines), sum(chunk.is_conflict for chunk in chunks)


def _lines(text: str) -> list[str]:
    # Not str.splitlines, which also cuts at form feeds and other separators inside a line.
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _ended(lines: Sequence[str]) -> list[str]:
    return [line if line.endswith("\n") else f"{line}\n" for line in lines]


def _common_runs(
    base: Sequence[str], ours: Sequence[str], theirs: Sequence[str]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield where all three agree, as starts in each and a length; the last run is empty."""
    to_ours = difflib.SequenceMatcher(None, base, ours, autojunk=False).get_matching_blocks()
    to_theirs = difflib.SequenceMatcher(None, base, theirs, autojunk=False).get_matching_blocks()
    first = 0
    second = 0
    while first < len(to_ours) and second < len(to_theirs):
        our_block = to_ours[first]
        their_block = to_theirs[second]
        start = max(our_block.a, their_block.a)
        end = min(our_block.a + our_block.size, their_block.a + their_block.size)
        if start < end:
            yield (
                start,
                our_block.b + start - our_block.a,
                their_block.b + start - their_block.a,
                end - start,
            )
        if our_block.a + our_block.size < their_block.a + their_block.size:
            first += 1
        else:
            second += 1
    yield len(base), len(ours), len(theirs), 0


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


def plan_update(root: Path, lock: Lock, compared: Sequence[Comparison]) -> WritePlan:
    """Plan what brings a project to the bundle's version and keeps every edit."""
    records = {}
    changes = []
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
    root: Path, lock: Lock, compared: Sequence[Comparison], *, overwrite: bool = False
) -> WritePlan:
    """Plan what writes the wanted files; those that differ are conflicts, or replaced."""
    records = dict(lock.files)
    changes = []
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
    ours = _text_of(comparison.yours)
    theirs = _text_of(comparison.wanted.content)
    base = comparison.record.base if comparison.record else None
    if ours is None or theirs is None or base is None:
        return Change(comparison.path, "in the way", comparison.yours, comparison.yours)
    if _has_conflict(comparison.yours):
        raise ScaffoldError(
            f"{comparison.path} has an unresolved conflict from an earlier update; "
            f"resolve it first: look for {OURS_MARKER!r}"
        )
    text, conflicts = merge_texts(base.decode(), ours, theirs)
    action = "conflict" if conflicts else "merge"
    return Change(comparison.path, action, comparison.yours, text.encode())


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
    """Write a new project whole, or nothing: a folder beside its place is renamed."""
    sweep(plan.root.parent)
    staging = _beside(plan.root)
    with _unwind_on_signals():
        try:
            staging.mkdir()
            for change in plan.changes:
                place = staging / change.path
                place.parent.mkdir(parents=True, exist_ok=True)
                assert change.after is not None, "a new project deletes nothing"
                write_file(place, change.after)
            staging.rename(plan.root)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def write_changes(plan: WritePlan) -> None:
    """Write a plan into a project that exists, so that a kill loses neither side.

    An error or a signal on the way rolls back; a kill is recovered by the next command.
    """
    if not plan.writes:
        return
    sweep(plan.root)
    staging = _beside(plan.root / "update")
    pending = plan.root / PENDING_FOLDER
    with _unwind_on_signals():
        try:
            staging.mkdir()
            _stage(plan, staging)
            staging.rename(pending)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        try:
            _apply(plan.root, pending)
        except BaseException:
            _roll_back(plan.root, pending)
            raise
    _finish(pending)


@contextlib.contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Hold a project against other commands that write; the end of the process releases it."""
    if not root.is_dir():
        yield
        return
    try:
        import fcntl
    except ImportError:
        # Windows has no fcntl.
        yield
        return
    folder = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ScaffoldError(
            f"another add or update is writing to {root}; run this again when it has ended"
        ) from error
    finally:
        os.close(folder)


def check_not_pending(root: Path) -> None:
    """Refuse to read a project in which a write was interrupted."""
    if (root / PENDING_FOLDER).is_dir():
        raise ScaffoldError(
            f"an earlier write in {root} was interrupted; run 'curry-train update' there to finish"
        )


def recover_update(root: Path) -> str | None:
    """Complete a write that was killed, or undo it if its files are damaged; say which."""
    if not root.is_dir():
        return None
    sweep(root)
    pending = root / PENDING_FOLDER
    if not pending.is_dir():
        return None
    with _unwind_on_signals():
        if _is_whole(pending):
            _apply(root, pending)
            done = "completed an earlier write that was interrupted"
        else:
            _roll_back(root, pending)
            done = "undid an earlier write that was interrupted and left damaged files"
    _finish(pending)
    return done


def sweep(folder: Path) -> None:
    """Remove what killed writes left in `folder`, except of processes that are alive."""
    for path in folder.iterdir():
        match = LEFTOVER_PATTERN.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_file(place: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    try:
        with place.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # A full disk names no file.
        error.filename = error.filename or str(place)
        raise


def _stage(plan: WritePlan, staging: Path) -> None:
    """Write both versions of each changed file, and the table of them, which is the last."""
    table = []
    for number, change in enumerate(plan.writes):
        for name, content in (("before", change.before), ("after", change.after)):
            if content is not None:
                write_file(staging / f"{number}.{name}", content)
        table.append(
            {
                "path": change.path,
                "before": None if change.before is None else digest(change.before),
                "after": None if change.after is None else digest(change.after),
                "folders": _missing_folders(plan.root, change.path),
            }
        )
    write_file(staging / "table.json", json.dumps(table).encode())


def _missing_folders(root: Path, path: str) -> list[str]:
    """Return the folders that writing `path` makes, the innermost first."""
    folders = [folder.as_posix() for folder in PurePosixPath(path).parents]
    return [folder for folder in folders if not (root / folder).is_dir()]


def _is_whole(pending: Path) -> bool:
    """Check that every staged file has its hash."""
    return all(
        entry["after"] is None or _staged(pending, number, "after", entry) is not None
        for number, entry in enumerate(_table(pending))
    )


def _table(pending: Path) -> list[dict[str, Any]]:
    try:
        table: list[dict[str, Any]] = json.loads((pending / "table.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ScaffoldError(
            f"{pending} is damaged ({error}); compare the project with version control, then "
            "delete that folder"
        ) from error
    return table


def _staged(pending: Path, number: int, name: str, entry: Mapping[str, Any]) -> bytes | None:
    """Return a staged content, or None if it is missing or damaged."""
    place = pending / f"{number}.{name}"
    content = place.read_bytes() if place.is_file() else None
    return content if content is not None and digest(content) == entry[name] else None


def _apply(root: Path, pending: Path) -> None:
    for number, entry in enumerate(_table(pending)):
        place = destination(root, entry["path"])
        current = place.read_bytes() if place.exists() else None
        found = None if current is None else digest(current)
        if found == entry["after"]:
            continue
        before = _staged(pending, number, "before", entry)
        after = _staged(pending, number, "after", entry)
        if found != entry["before"]:
            # Edited since the plan was made: merge once more instead of overwriting.
            after = _merge_again(before, current, after)
        _put(place, after)


def _roll_back(root: Path, pending: Path) -> None:
    for number, entry in enumerate(_table(pending)):
        place = destination(root, entry["path"])
        current = place.read_bytes() if place.exists() else None
        found = None if current is None else digest(current)
        if found != entry["after"] or entry["after"] == entry["before"]:
            continue
        before = _staged(pending, number, "before", entry)
        if before is None and entry["before"] is not None:
            raise ScaffoldError(
                f"{place} can't be restored: its copy in {pending} is damaged; take the file "
                "from version control, then delete that folder"
            )
        _put(place, before)
        for folder in entry["folders"]:
            with contextlib.suppress(OSError):  # not empty, or never made
                (root / folder).rmdir()
    _finish(pending)


def _merge_again(before: bytes | None, current: bytes | None, after: bytes | None) -> bytes | None:
    base = _text_of(before or b"")
    ours = _text_of(current or b"")
    theirs = _text_of(after or b"")
    if current is None or after is None or base is None or ours is None or theirs is None:
        return current
    return merge_texts(base, ours, theirs)[0].encode()


def _put(place: Path, content: bytes | None) -> None:
    """Make `place` hold `content`, at once; None removes it."""
    if content is None:
        place.unlink(missing_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    sweep(place.parent)
    staging = _beside(place)
    try:
        write_file(staging, content)
        if place.exists():
            shutil.copymode(place, staging)
        staging.replace(place)
    finally:
        staging.unlink(missing_ok=True)


def _finish(pending: Path) -> None:
    """Remove the staged files; half of them can't be taken for a write to complete."""
    if pending.is_dir():
        done = _beside(pending)
        pending.rename(done)
        shutil.rmtree(done)


def _beside(place: Path) -> Path:
    return place.with_name(f".{place.name}.curry-train-{os.getpid()}")


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        # A leftover with our own number is from a process before us.
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and someone else's
    return True


@contextlib.contextmanager
def _unwind_on_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM run the clean-up on their way out."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous: dict[int, Callable[..., Any] | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, unwind)
    try:
        yield
    finally:
        for handled, handler in previous.items():
            signal.signal(handled, handler)
