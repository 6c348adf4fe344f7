"""Compare a project with what it was copied from, merge by git, and write it file by file.

`curry-train.lock` names each copied file's version and holds its text compressed: this base makes a
three-way merge possible without a network.

Files are staged in one folder first and then replaced, the lock last. Where a project is tracked
by git, git restores what it had before.

Proof: `python -m pytest tests/cli/test_scaffold_merge.py`.
"""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..core.wording import write_output
from .screen import UnusableInput

LOCK_NAME = "curry-train.lock"
STAGING_PREFIX = ".curry-train-staged-"

# Git's marker before lines that both sides changed.
OURS_MARKER = "<<<<<<< yours"
MOST_CONFLICTS = 127  # the highest exit status of `git merge-file` that is a number of conflicts


# The lock


class Base(NamedTuple):
    """The version that a file was copied from, and its content then."""

    version: str
    content: bytes


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
    files: Mapping[str, Base] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the lock as JSON."""
        files = {
            path: [version, base64.b64encode(zlib.compress(content, 9)).decode()]
            for path, (version, content) in sorted(self.files.items())
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
        names = [document[key] or "" for key in ("project", "directory", "package")]
        texts = [document["version"], *names] + document["techniques"]
        if not all(isinstance(one, str) for one in texts):
            raise TypeError("a name is no text")
        return Lock(**document | {"techniques": tuple(document["techniques"]), "files": files})
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise UnusableInput(
            f"{path} is damaged ({error}); take it back from version control, or delete it"
        ) from error


# States of copied files, and the changes that a command makes


class CopiedFile(NamedTuple):
    """One file: its content when copied, in the project and in the bundle; None for no file."""

    path: str
    base: bytes | None
    yours: bytes | None
    wanted: bytes | None

    @property
    def state(self) -> str:
        """Return whose content it has, or lacks."""
        if self.wanted is None:
            return "gone from bundle"
        if self.yours is None:
            return "new in bundle" if self.base is None else "missing"
        if self.yours == self.wanted:
            return "as it came"
        if self.base is None:
            return "yours"
        if self.yours == self.base:
            return "newer in bundle"
        return "edited" if self.wanted == self.base else "both"


class Change(NamedTuple):
    """A change to one file: its content before and after, or None if it does not exist then."""

    path: str
    action: str
    before: bytes | None
    after: bytes | None


def compare_files(root: Path, lock: Lock, wanted: Mapping[str, bytes]) -> list[CopiedFile]:
    """Compare every file that the lock records or the bundle would write now."""
    bases = {path: base.content for path, base in lock.files.items()}
    compared = []
    for path in sorted({*bases, *wanted}):
        yours = content_of(destination(root, path))
        # Git, or an editor, may have converted the line ends of the user's file.
        base, came = (
            side and re.sub(rb"\r?\n", line_end(yours or side), side)
            for side in (bases.get(path), wanted.get(path))
        )
        compared.append(CopiedFile(path, base, yours, came))
    return compared


def line_end(content: bytes) -> bytes:
    return b"\r\n" if b"\r\n" in content else b"\n"


def plan_changes(root: Path, lock: Lock, wanted: Mapping[str, bytes]) -> list[Change]:
    """Decide on each file; the last change is that of the lock, which names them."""
    bases = dict(lock.files)
    changes = []
    for file in compare_files(root, lock, wanted):
        changes.append(updated(file))
        if file.wanted is None:
            bases.pop(file.path)
        # A base that is the same keeps its version, so that locks differ only where files do.
        elif file.state != "missing" and file.base != file.wanted:
            bases[file.path] = Base(lock.version, wanted[file.path])
    if yours := [change.path for change in changes if change.action == "in the way"]:
        raise UnusableInput(
            f"nothing was written, because files of yours are in the way: {', '.join(yours)}. Move "
            "them, or add techniques with another --into"
        )
    before = content_of(destination(root, LOCK_NAME))
    return [*changes, replaced(LOCK_NAME, before, replace(lock, files=bases).to_bytes())]


def content_of(place: Path) -> bytes | None:
    return place.read_bytes() if place.exists() else None


def replaced(path: str, before: bytes | None, after: bytes | None) -> Change:
    """Write, replace or delete a file that holds no edits of the user's."""
    return updated(CopiedFile(path, before, before, after))


def destination(root: Path, path: str) -> Path:
    """Return where `path` lies once links are followed; refuse a place outside `root`."""
    place = (root / path).resolve()
    if not place.is_relative_to(root.resolve()):
        raise UnusableInput(f"{root / path} leads out of {root} to {place}; remove that link first")
    folder = next(folder for folder in place.parents if folder.exists())
    if not folder.is_dir():
        raise UnusableInput(f"{folder} is a file, and a folder must go there; move it away first")
    if place.is_dir():
        raise UnusableInput(f"{place} is a folder, and a file must go there; move it away first")
    return place


# For each state of a file: the word that `update` prints for it.
ACTIONS = {
    "as it came": "same",
    "both": "merge",
    "edited": "keep",
    "gone from bundle": "yours now",
    "missing": "missing",
    "new in bundle": "create",
    "newer in bundle": "replace",
    "yours": "in the way",
}


def updated(file: CopiedFile) -> Change:
    """Bring a file to the bundle's version and keep every edit."""
    action = ACTIONS[file.state]
    after = file.yours
    if action in ("create", "replace"):
        after = file.wanted
    elif action == "merge":
        return _merge(file)
    elif action == "yours now":
        if file.yours in (None, file.base):
            return Change(file.path, "delete", file.yours, None)
    elif _has_conflict(file):
        action = "conflict"
    return Change(file.path, action, file.yours, after)


def _has_conflict(file: CopiedFile) -> bool:
    """Return whether an update marked a conflict that nobody has resolved."""
    return OURS_MARKER.encode() in (file.yours or b"").splitlines()


def _merge(file: CopiedFile) -> Change:
    """Merge both edits of a file by git; conflicts are marked in the text."""
    # Git writes these names next to its markers.
    sides = {"yours": file.yours, "base": file.base, "curry-train": file.wanted}
    if _has_conflict(file):
        raise UnusableInput(
            f"{file.path} has an unresolved conflict from an earlier update; "
            f"resolve it first: look for {OURS_MARKER!r}"
        )
    with tempfile.TemporaryDirectory() as folder:
        for name, content in sides.items():
            Path(folder, name).write_bytes(content or b"")
        try:
            done = subprocess.run(
                ["git", "merge-file", "-p", *sides], cwd=folder, capture_output=True
            )
        except FileNotFoundError as error:
            raise UnusableInput("merging your edits needs git; install it first") from error
    if done.returncode > MOST_CONFLICTS:
        raise UnusableInput(f"git can't merge {file.path}: {done.stderr.decode().strip()}")
    return Change(file.path, "conflict" if done.returncode else "merge", file.yours, done.stdout)


def write_changes(root: Path, changes: Sequence[Change]) -> None:
    """Stage all files, then replace them one by one, the lock last.

    After a kill in between, the same command writes the rest: each file holds its old content or
    its new one.
    """
    writes = [change for change in changes if change.before != change.after]
    if not writes:
        return
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    with tempfile.TemporaryDirectory(dir=root, prefix=STAGING_PREFIX) as folder:
        staged = {change: Path(folder, str(number)) for number, change in enumerate(writes)}
        for change, new in staged.items():
            write_output(new, change.after or b"")
        for change, new in staged.items():
            place = destination(root, change.path)
            if change.after is None:
                place.unlink(missing_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                shutil.copymode(place, new)
            new.replace(place)
