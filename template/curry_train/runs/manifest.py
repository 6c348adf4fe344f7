"""The manifest of a checkpoint: size and hash of every file in it, and of itself. Without it nothing was committed.

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
MOST_NAMED = 3


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of one file."""

    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of, and what it consists of."""

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
        """The only text that stands for this manifest, so that a change of any bit is seen."""
        content = {"format": FORMAT, **asdict(self)}
        content["hash"] = hash_bytes(self.algorithm, _text(content))
        return _text(content)


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def parse_manifest(data: bytes) -> Manifest:
    """The manifest that these bytes are, to the last of them."""
    try:
        content = json.loads(data)
        if content["format"] != FORMAT:
            raise DamagedCheckpoint(
                f"the manifest has format {content['format']!r}, and {FORMAT} is known here"
            )
        manifest = Manifest(
            algorithm=content["algorithm"],
            kind=content["kind"],
            step=content["step"],
            files={name: FileEntry(**entry) for name, entry in content["files"].items()},
            metric=None if content["metric"] is None else Metric(**content["metric"]),
            about=content["about"],
        )
        same = manifest.render() == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"the manifest can't be read ({type(error).__name__}: {error})"
        ) from error
    if not same:
        raise DamagedCheckpoint("the manifest's own hash does not match it")
    return manifest


def read_manifest(files: Files, folder: str) -> Manifest:
    """The manifest of a folder, that it is the manifest of this folder, and that files of these sizes are there."""
    where = files.location(folder)
    if files.kind(folder) != "folder":
        raise DamagedCheckpoint(
            f"{where} is {_what(files.kind(folder))}, not a folder that was saved"
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
    wrong = _differences(files, folder, manifest)
    if wrong:
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise DamagedCheckpoint(f"{where}: {'; '.join(wrong[:MOST_NAMED])}{more}")
    return manifest


def _differences(files: Files, folder: str, manifest: Manifest) -> list[str]:
    present = set(files.names(folder)) - {MANIFEST}
    wrong = [f"{name} is not in the manifest" for name in sorted(present - set(manifest.files))]
    for name, entry in manifest.files.items():
        kind = files.kind(f"{folder}/{name}") if name in present else None
        if kind != "file":
            wrong.append(f"{name} is {_what(kind)}")
        elif (size := files.size(f"{folder}/{name}")) != entry.bytes:
            wrong.append(f"{name} has {size:,} bytes, and {entry.bytes:,} were saved")
    return wrong


def _what(kind: str | None) -> str:
    return {None: "missing", "other": "a link or a device"}.get(kind, f"a {kind}")


def verify_files(files: Files, folder: str, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files again, and compare their hashes."""
    for name in names:
        try:
            with files.open(f"{folder}/{name}") as stream:
                num_bytes, found = hash_stream(manifest.algorithm, stream)
        except OSError as error:
            raise DamagedCheckpoint(
                f"{files.location(folder)}: {name} can't be read ({error})"
            ) from error
        if (num_bytes, found) != (manifest.files[name].bytes, manifest.files[name].hash):
            raise DamagedCheckpoint(
                f"{files.location(folder)}: {name} is not what was saved (another hash)"
            )
