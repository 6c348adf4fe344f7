"""`curry-train.lock`: which files of a project came from which bundle, and with which bytes.

It lets `add` and `diff` tell an edit of the user's from a file that an older bundle wrote.
Proof: `python -m pytest tests/cli/test_scaffold_commands.py -k lock`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import ScaffoldError

LOCK = "curry-train.lock"


@dataclass(frozen=True)
class Record:
    """One file as it was written."""

    sha256: str
    bundle: str


@dataclass(frozen=True)
class Lock:
    """`project` is None where techniques were added to a repository that curry-train did not make."""

    bundle: str
    project: str | None
    directory: str
    package: str
    files: Mapping[str, Record] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        files = {path: vars(record) for path, record in sorted(self.files.items())}
        package = {"directory": self.directory, "name": self.package}
        document = {
            "bundle": self.bundle,
            "project": self.project,
            "package": package,
            "files": files,
        }
        return (json.dumps(document, indent=2) + "\n").encode()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_lock(root: Path) -> Lock | None:
    """The lock of the project at `root`, or None where there is none."""
    path = root / LOCK
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        files = {
            name: Record(_text(of["sha256"]), _text(of["bundle"]))
            for name, of in document["files"].items()
        }
        package = document["package"]
        project = None if document["project"] is None else _text(document["project"])
        lock = Lock(
            _text(document["bundle"]),
            project,
            _text(package["directory"]),
            _text(package["name"]),
            files,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScaffoldError(
            f"{path} is damaged ({error}); take it back from version control, or delete it"
        ) from error
    for name in (lock.directory, *lock.files):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ScaffoldError(
                f"{path} names {name}, which lies outside the project; take it back or delete it"
            )
    return lock


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
