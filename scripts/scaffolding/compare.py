"""Compares a project with the bundle: what the user changed, and what the bundle has since.

Proof: `python -m pytest tests/cli/test_scaffold_commands.py -k diff`.
"""

import difflib
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .bundle import PACKAGE, Bundle
from .contents import render
from .errors import ScaffoldError
from .imports import rewrite_imports
from .lock import LOCK, Lock, read_lock, sha256


class Change(enum.StrEnum):
    UNCHANGED = "unchanged"
    EDITED = "edited by you"
    NEWER = "newer in the bundle"
    BOTH = "both edited and newer"
    DELETED = "deleted by you"
    GONE = "gone from the bundle"


@dataclass(frozen=True)
class Comparison:
    """One recorded file; `yours` and `bundles` are None where it does not exist."""

    path: str
    change: Change
    yours: bytes | None
    bundles: bytes | None


def compare_project(bundle: Bundle, root: Path) -> list[Comparison]:
    """Every file that the lock of the project at `root` records."""
    lock = read_lock(root)
    if lock is None:
        raise ScaffoldError(
            f"{root} has no {LOCK}; name the folder of a project that 'scaffold.py' wrote to"
        )
    return [_compare(bundle, root, lock, path) for path in lock.files]


def patch(comparison: Comparison) -> str:
    """A unified diff from the user's file to the bundle's; nothing where one of them is gone from the bundle."""
    if comparison.bundles is None or comparison.yours == comparison.bundles:
        return ""
    return "".join(_patch_lines(comparison.path, comparison.yours, comparison.bundles))


def _compare(bundle: Bundle, root: Path, lock: Lock, path: str) -> Comparison:
    place = root / path
    yours = place.read_bytes() if place.exists() else None
    bundles = _bundles_version(bundle, lock, path)
    written = lock.files[path].sha256
    if bundles is None:
        change = Change.GONE
    elif yours is None:
        change = Change.DELETED
    elif yours == bundles:
        change = Change.UNCHANGED
    elif sha256(yours) == written:
        change = Change.NEWER
    elif sha256(bundles) == written:
        change = Change.EDITED
    else:
        change = Change.BOTH
    return Comparison(path, change, yours, bundles)


def _bundles_version(bundle: Bundle, lock: Lock, path: str) -> bytes | None:
    """What the bundle would write at `path` today."""
    place = PurePosixPath(path)
    if place.is_relative_to(lock.directory):
        source = bundle.template / PACKAGE / place.relative_to(lock.directory)
        return source.read_bytes() if source.is_file() else None
    if lock.project is not None and (bundle.template / f"{path}.jinja").is_file():
        return render(bundle, path, name=lock.project)
    source = bundle.template / path
    return rewrite_imports(source.read_bytes(), package=lock.package) if source.is_file() else None


def _patch_lines(path: str, yours: bytes | None, bundles: bytes) -> Iterator[str]:
    try:
        before = (yours or b"").decode().splitlines(keepends=True)
        after = bundles.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        yield f"Binary files a/{path} and b/{path} differ\n"
        return
    origin = "/dev/null" if yours is None else f"a/{path}"
    for line in difflib.unified_diff(before, after, origin, f"b/{path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
