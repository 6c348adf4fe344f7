"""Write, read and verify the manifest of a checkpoint.

The manifest records the size and hash of every file, and its own hash. A checkpoint without a
manifest is not committed.

Proof: `python -m pytest tests/test_store_damage.py`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .digests import hash_bytes, hash_stream
from .errors import DamagedCheckpoint
from .files import Files
from .names import Metric, folder_name

MANIFEST = "manifest.json"
FORMAT = 1
# Number of damaged files that an error names.
MOST_NAMED = 3


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The identity of a checkpoint and the list of its files."""

    algorithm: str
    kind: str
    step: int
    files: Mapping[str, FileEntry]
    metric: Metric | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def render(self) -> bytes:
        """Return the canonical bytes of the manifest, so that a change of any bit is detected."""
        content = {"format": FORMAT, **asdict(self)}
        content["hash"] = hash_bytes(self.algorithm, _text(content))
        return _text(content)


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def parse_manifest(data: bytes) -> Manifest:
    """Parse the bytes of a manifest; raise DamagedCheckpoint unless every byte is canonical."""
    try:
        content = json.loads(data)
        if content["format"] != FORMAT:
            raise DamagedCheckpoint(
                f"the manifest has format {content['format']!r}, and this version of the package "
                f"reads only format {FORMAT}: use the version that wrote it"
            )
        manifest = Manifest(
            algorithm=content["algorithm"],
            kind=content["kind"],
            step=content["step"],
            files={name: FileEntry(**entry) for name, entry in content["files"].items()},
            metric=None if content["metric"] is None else Metric(**content["metric"]),
            about=content["about"],
        )
        is_canonical = manifest.render() == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"the manifest can't be read ({type(error).__name__}: {error})"
        ) from error
    if not is_canonical:
        raise DamagedCheckpoint("the manifest's own hash does not match it")
    return manifest


def read_manifest(files: Files, folder: str) -> Manifest:
    """Read the manifest of a folder, and check its name and the sizes of its files.

    Does not read the files; see `verify_files`. Raises DamagedCheckpoint.
    """
    where = files.location(folder)
    if files.kind(folder) != "folder":
        raise DamagedCheckpoint(
            f"{where} is {_what(files.kind(folder))}, not the folder of a checkpoint"
        )
    if files.kind(f"{folder}/{MANIFEST}") != "file":
        raise DamagedCheckpoint(f"{where} has no {MANIFEST}: its save was not finished")

    try:
        manifest = parse_manifest(files.read(f"{folder}/{MANIFEST}"))
        name = folder_name(manifest.kind, manifest.step, manifest.metric)
    except (DamagedCheckpoint, ValueError, OSError) as error:
        raise DamagedCheckpoint(f"{where}: {error}") from error
    if name != folder:
        raise DamagedCheckpoint(
            f"{where} holds the manifest of {name}: it was renamed or copied here"
        )

    differences = _differences(files, folder, manifest)
    if differences:
        num_more = len(differences) - MOST_NAMED
        more = f" and {num_more} more" if num_more > 0 else ""
        raise DamagedCheckpoint(f"{where}: {'; '.join(differences[:MOST_NAMED])}{more}")
    return manifest


def _differences(files: Files, folder: str, manifest: Manifest) -> list[str]:
    present = set(files.names(folder)) - {MANIFEST}
    unknown = sorted(present - set(manifest.files))
    differences = [f"{name} is not in the manifest" for name in unknown]
    for name, entry in manifest.files.items():
        kind = files.kind(f"{folder}/{name}") if name in present else None
        if kind != "file":
            differences.append(f"{name} is {_what(kind)}")
        elif (size := files.size(f"{folder}/{name}")) != entry.bytes:
            differences.append(f"{name} has {size:,} bytes, and {entry.bytes:,} were saved")
    return differences


def _what(kind: str | None) -> str:
    """Describe the kind of a directory entry for a message."""
    return {None: "missing", "other": "a link or a device"}.get(kind, f"a {kind}")


def verify_files(files: Files, folder: str, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files and compare their sizes and hashes with the manifest."""
    for name in names:
        try:
            with files.open(f"{folder}/{name}") as stream:
                num_bytes, file_hash = hash_stream(manifest.algorithm, stream)
        except OSError as error:
            raise DamagedCheckpoint(
                f"{files.location(folder)}: {name} can't be read ({error})"
            ) from error
        if FileEntry(num_bytes, file_hash) != manifest.files[name]:
            raise DamagedCheckpoint(
                f"{files.location(folder)}: {name} is not what was saved (another hash)"
            )
