"""What a command would write, decided before anything is: one plan serves the dry run and the write.

Proof: `python -m pytest tests/cli/test_scaffold_add.py tests/cli/test_scaffold_commands.py`.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import ScaffoldError
from .lock import LOCK, Lock, Record, read_lock, sha256


class State(enum.StrEnum):
    CREATE = "create"
    SAME = "same"
    CONFLICT = "conflict"
    REPLACE = "replace"
    YOURS = "yours"


@dataclass(frozen=True)
class Entry:
    """One file: `path` is relative to the plan's root, `reason` says whose bytes are in the way."""

    path: str
    content: bytes
    state: State
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """All files of one command, in the order in which they are written; the lock is the last."""

    root: Path
    entries: tuple[Entry, ...]

    def having(self, *states: State) -> list[Entry]:
        return [entry for entry in self.entries if entry.state in states]

    @property
    def writes(self) -> list[Entry]:
        return self.having(State.CREATE, State.REPLACE)


def make_plan(
    root: Path,
    contents: Mapping[str, bytes],
    *,
    lock: Lock,
    overwrite: bool = False,
    spared: Collection[str] = (),
) -> Plan:
    """Compare `contents` with what is under `root`.

    `lock` says which bundle, project and package the plan is for. Files in `spared` are left to the user once these
    hold something of their own.
    """
    known = read_lock(root)
    records = dict(known.files) if known else {}
    entries = []
    for path, content in contents.items():
        entry = _compare(root, path, content, records.get(path))
        if (
            entry.state is State.CONFLICT
            and path in spared
            and not _is_untouched(root, path, records)
        ):
            entry = replace(entry, state=State.YOURS)
        elif entry.state is State.CONFLICT and overwrite:
            entry = replace(entry, state=State.REPLACE)
        entries.append(entry)
        digest = sha256(content)
        if entry.state is not State.YOURS and (
            path not in records or records[path].sha256 != digest
        ):
            records[path] = Record(digest, lock.bundle)
    entries.append(_lock_entry(root, replace(lock, files=records)))
    return Plan(root, tuple(entries))


def refuse_conflicts(plan: Plan, *, advice: str) -> None:
    """Stop, naming each file that is in the way and whose it is."""
    conflicts = plan.having(State.CONFLICT)
    if conflicts:
        count = "1 file is" if len(conflicts) == 1 else f"{len(conflicts)} files are"
        lines = [f"  {entry.path}: {entry.reason}" for entry in conflicts]
        raise ScaffoldError("\n".join([f"{count} in the way; nothing was written", *lines, advice]))


def destination(root: Path, path: str) -> Path:
    """Where `path` really lies once links are followed; refused when that is outside `root`."""
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


def _compare(root: Path, path: str, content: bytes, record: Record | None) -> Entry:
    place = destination(root, path)
    if not place.exists():
        return Entry(path, content, State.CREATE)
    there = place.read_bytes()
    if there == content:
        return Entry(path, content, State.SAME)
    if record is None:
        reason = "yours: curry-train did not write it"
    elif record.sha256 == sha256(there):
        reason = f"from an older bundle ({record.bundle}), not edited by you"
    else:
        reason = f"edited by you (it came from bundle {record.bundle})"
    return Entry(path, content, State.CONFLICT, reason)


def _is_untouched(root: Path, path: str, records: Mapping[str, Record]) -> bool:
    return path in records and records[path].sha256 == sha256((root / path).read_bytes())


def _lock_entry(root: Path, lock: Lock) -> Entry:
    content, place = lock.to_bytes(), destination(root, LOCK)
    if not place.exists():
        return Entry(LOCK, content, State.CREATE)
    return Entry(LOCK, content, State.SAME if place.read_bytes() == content else State.REPLACE)
