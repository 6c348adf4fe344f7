"""Names, manifests and digests of the files of a run.

Examples: `rollback/step-00000500.dcp`, `best-k/dev_loss-0.25-step-00000450.dcp`. Steps are compared
as numbers, because text sorts step 10 before step 9. Metrics are compared by the value in the
manifest.

Proof: `python -m pytest tests/runs/test_store.py tests/runs/test_store_damage.py`.
"""

import functools
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ..core.wording import did_you_mean, some_of
from .files import StrPath, read, sizes
from .ranks import DamagedCheckpoint, reading

# Names of the checkpoints in a run's folder.

CHECKPOINT_KINDS = ("rollback", "recovery", "best-k")
RESUMABLE_KINDS = ("rollback", "recovery")
BEST_KIND = "best-k"
CHECKPOINT_SUFFIX = ".dcp"

_FOLDER_PATTERN = re.compile(
    r"(?:rollback/|recovery/|best-k/[A-Za-z]\w*--?\d[\d.]*(?:e[+-]\d+)?-)step-(\d{8,18})\.dcp"
)


# Name and value of the figure that ranks checkpoints, such as dev_loss.
Metric = tuple[str, float]


def folder_name(kind: str, step: int, metric: Metric | None = None) -> str:
    """Return the folder of a checkpoint, relative to the run's folder."""
    if type(step) is not int:
        raise ValueError(f"a step is a whole number from 0, got {step!r}: pass an int")
    prefix = "{}-{:.6g}-".format(*metric) if metric else ""
    name = f"{kind}/{prefix}step-{step:08d}{CHECKPOINT_SUFFIX}"
    if step_of(name) is None:
        raise ValueError(
            f"{name!r} is no name of a checkpoint: a step is a whole number from 0, and only a "
            f"{BEST_KIND} has a metric, a word such as dev_loss with a finite value"
        )
    return name


def step_of(folder: str) -> int | None:
    """Return the step of a checkpoint's folder in its run, or None if it is of no checkpoint."""
    found = _FOLDER_PATTERN.fullmatch(folder)
    return int(found[1]) if found else None


def find_run(
    given: str, *, root: StrPath, is_run: Callable[[Path], bool], kind: str = "run"
) -> Path:
    """Return the place of a run, given by its name in `root` or its path; raise ValueError."""
    path = Path(given)
    for place in (Path(root, given), path):
        if is_run(place):
            return place
    if any(path.glob("rank-*.jsonl")):
        raise ValueError(f"{given} is a record: compare two of them by `curry-train runs locate`")
    # A path is searched for in its own parent folder.
    folder = path.parent if path.parent.name else Path(root)
    runs = sorted(place.name for place in folder.glob("*/") if is_run(place))
    known = f"{folder} has {some_of(runs) or f'no {kind}'}"
    meant = did_you_mean(path.name, runs, otherwise=known)
    raise ValueError(f"{given} is no {kind}; {meant}")


def split_request(text: str, *, root: StrPath = "") -> tuple[str, str]:
    """Return the path and the request of `runs/x@best`, or of the path of a checkpoint in a run.

    A path or name may have an @ of its own.
    """
    path = Path(text)
    folder = f"{path.parent.name}/{path.name}"
    if step_of(folder) is not None:
        return str(path.parent.parent), folder
    place, _, inside = text.rpartition("@")
    exists = path.exists() or Path(root, text).exists()
    is_whole = not place or "/" in inside or exists
    return (text, "") if is_whole else (place, inside)


# Hash files while they are written.

HASH_NAME = "xxh3_128"


def hash_bytes(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def entry_of(path: Path) -> "FileEntry":
    """Return size and hash of a file, which is on the disk afterwards."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return entry_in(stream)


def entry_in(stream: io.BufferedReader) -> "FileEntry":
    """Return size and hash of what a stream holds."""
    file_hash = hashlib.file_digest(stream, xxhash.xxh3_128)
    return FileEntry(stream.tell(), file_hash.hexdigest())


# Write, read and verify the manifest of a checkpoint.

MANIFEST_FILE_NAME = "manifest.json"


class FileEntry(NamedTuple):
    bytes: int
    hash: str


@dataclass(frozen=True)
class SavedCheckpoint:
    """The identity of a checkpoint and the list of its files, as its manifest has them."""

    kind: str
    step: int
    files: Mapping[str, FileEntry] = field(hash=False)
    metric: Metric | None = None
    # When it was saved, in UTC; the newest sorts last.
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    # Of a trainer's file: size, hash and date of the one whose place it takes.
    before: tuple[Any, ...] = ()
    # The path that other tools open, which the manifest does not hold.
    location: Path = Path()

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @property
    def folder(self) -> str:
        """The folder of the checkpoint, relative to the run's folder."""
        return folder_name(self.kind, self.step, self.metric)

    @property
    def is_state(self) -> bool:
        """Whether training can resume from it: a rollback or a recovery."""
        return self.kind in RESUMABLE_KINDS

    def render(self) -> bytes:
        """Return the canonical bytes of the manifest, so that a change of any bit is detected."""
        content = asdict(self)
        del content["location"]
        content["hash"] = hash_bytes(_render(content))
        return _render(content)


def _render(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


@functools.lru_cache(maxsize=256)
def parse_manifest(data: bytes) -> SavedCheckpoint:
    """Parse the bytes of a manifest; raise DamagedCheckpoint unless every byte is canonical."""
    with reading("the manifest can't be read"):
        content = json.loads(data)
        content["files"] = {name: FileEntry(*entry) for name, entry in content["files"].items()}
        content["metric"] = content["metric"] and tuple(content["metric"])
        content["date"] = str(content["date"])
        content["before"] = tuple(content["before"])
        del content["hash"]
        manifest = SavedCheckpoint(**content)
        is_canonical = manifest.render() == data
    if not is_canonical:
        raise DamagedCheckpoint("the manifest's own hash does not match it")
    return manifest


def read_manifest(root: Path, folder: str) -> SavedCheckpoint:
    """Read the manifest of a folder of a run, and check its name and the sizes of its files.

    Does not read the files; see `verify_files`. Raises DamagedCheckpoint.
    """
    where = root / folder
    if where.is_symlink() or not where.is_dir():
        raise DamagedCheckpoint(f"{where} is not the folder of a checkpoint")
    path = where / MANIFEST_FILE_NAME
    if path.is_symlink() or not path.is_file():
        raise DamagedCheckpoint(f"{where} has no {MANIFEST_FILE_NAME}: its save was not finished")

    try:
        manifest = parse_manifest(read(path))
        name = manifest.folder
    except (DamagedCheckpoint, AttributeError, TypeError, ValueError, OSError) as error:
        raise DamagedCheckpoint(f"{where}: {error}") from error
    if name != folder:
        raise DamagedCheckpoint(
            f"{where} holds the manifest of {name}: it was renamed or copied here"
        )

    manifest = replace(manifest, location=where)
    check_sizes(manifest)
    return manifest


def check_sizes(manifest: SavedCheckpoint) -> None:
    """Raise DamagedCheckpoint for a file that is missing, unknown or of another size."""
    path = manifest.location
    found = sizes(path)
    for name in {*found, *manifest.files} - {MANIFEST_FILE_NAME}:
        entry = manifest.files.get(name)
        if entry is None:
            raise DamagedCheckpoint(f"{path}: {name} is not in the manifest")
        if (size := found.get(name)) is None:
            what = "a link or device" if name in found else "missing"
            raise DamagedCheckpoint(f"{path}: {name} is {what}")
        if size != entry.bytes:
            raise DamagedCheckpoint(
                f"{path}: {name} has {size:,} bytes, and {entry.bytes:,} were saved"
            )


def verify_files(manifest: SavedCheckpoint, names: Iterable[str]) -> None:
    """Read these files and compare their sizes and hashes with the manifest."""
    path = manifest.location
    folder = path if path.is_dir() else path.parent
    for name in names:
        with reading(f"{folder}: {name} can't be read"), (folder / name).open("rb") as stream:
            entry = entry_in(stream)
        if entry != manifest.files[name]:
            raise DamagedCheckpoint(f"{folder}: {name} is not what was saved (another hash)")
