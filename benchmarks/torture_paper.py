"""Store manifests alone in memory, so that ten thousand histories take minutes.

Saving, removing, sweeping and the note of a rollback run the store's code; the process may end at
each change.
Proof: `python -m pytest tests/benchmarks/test_torture_retention.py`.
"""

import functools
import io
from dataclasses import dataclass
from typing import Any, BinaryIO

from curry_train.runs.files import Files
from curry_train.runs.format import LoadReport, Snapshot
from curry_train.runs.layout import (
    MANIFEST_FILE_NAME,
    Manifest,
    Metric,
    SavedCheckpoint,
    folder_name,
    parse_manifest,
)
from curry_train.runs.ranks import DamagedCheckpoint
from curry_train.runs.store import Store

FIRST = 99_999_994  # later steps have nine digits, and as text sort before this one


class Crash(BaseException):
    """Raised where the process ends; no error handler may catch it."""


class PaperFiles(Files):
    """Keep files in memory; the process ends at the change that `left` counts down to."""

    def __init__(self) -> None:
        super().__init__("/paper")
        self.held: dict[str, bytes] = {}
        self.left: int | None = None

    def change(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Crash

    def location(self, key: str) -> str:
        return f"paper/{key}"

    def make_folder(self, key: str) -> None: ...

    def sync_folder(self, key: str) -> None: ...

    def create(self, key: str) -> BinaryIO:
        raise NotImplementedError("only whole files are written here")

    def finish(self, stream: BinaryIO) -> None:
        raise NotImplementedError("only whole files are written here")

    def write(self, key: str, data: bytes) -> None:
        self.change()
        self.held[key] = data

    def put(self, key: str, data: bytes) -> None:
        raise NotImplementedError("nothing is locked here")

    def rename(self, old: str, new: str) -> None:
        self.change()
        for key in [key for key in self.held if key.startswith(f"{old}/")]:
            self.held[new + key.removeprefix(old)] = self.held.pop(key)

    def remove_folder(self, key: str) -> None:
        self.change()
        for name in [name for name in self.held if name.startswith(f"{key}/")]:
            del self.held[name]

    def remove_file(self, key: str) -> None:
        self.change()
        del self.held[key]

    def names(self, key: str) -> list[str]:
        return sorted(
            {
                name.removeprefix(f"{key}/").split("/")[0]
                for name in self.held
                if name.startswith(f"{key}/")
            }
        )

    def kind(self, key: str) -> str | None:
        if key in self.held:
            return "file"
        return "folder" if self.names(key) else None

    def size(self, key: str) -> int:
        return len(self.held[key])

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.held[key])

    def free_bytes(self, key: str = "") -> int:
        return 2**60

    def point(self, key: str, target: str) -> None: ...

    def pointed(self, key: str) -> str | None:
        return None


class PaperStore(Store):
    """Store a manifest per checkpoint; those in `rotten` are found damaged when read."""

    def __init__(self, files: PaperFiles, rotten: set[str]) -> None:
        super().__init__("paper", files=files)
        self.rotten = rotten

    def open(self) -> None:
        if not self._opened:
            self._number_line()
            self._sweep()
            self._opened = True

    def save(
        self, kind: str, step: int, state: Any, *, metric: tuple[str, float] | None = None
    ) -> SavedCheckpoint:
        self.open()
        found = None if metric is None else Metric(*metric)
        final = folder_name(kind, step, found)
        folder = self._prepare(final)
        manifest = Manifest(self.algorithm, kind, step, {}, found, line=self.line)
        self.files.write(f"{folder}/{MANIFEST_FILE_NAME}", manifest.render())
        if self.files.kind(final) is not None:
            self._remove(final)
        self.files.rename(folder, final)
        self.rotten.discard(final)
        return self._saved(final, manifest)

    def committed(self, kind: str) -> list[SavedCheckpoint]:
        """List checkpoints as the store does, but read each manifest once."""
        return [
            _saved(self.files.held[key], key)
            for key in sorted(self.files.held)
            if key.startswith((f"{kind}/step", f"{kind}/dev"))
        ]

    def damaged(self, kind: str) -> dict[str, str]:
        return {}

    def verify(self, checkpoint: Any) -> Manifest:
        if self.folder_of(checkpoint) in self.rotten:
            raise DamagedCheckpoint(f"{checkpoint} is rotten")
        return super().verify(checkpoint)

    def load(self, checkpoint: Any, state: Any, *, strict: bool = True) -> LoadReport:
        state.step = self.verify(checkpoint).step
        return LoadReport()


@functools.lru_cache(maxsize=100_000)
def _saved(data: bytes, key: str) -> SavedCheckpoint:
    manifest, folder = parse_manifest(data), key.removesuffix(f"/{MANIFEST_FILE_NAME}")
    return SavedCheckpoint(
        manifest.kind, manifest.step, folder, folder, manifest.metric, line=manifest.line
    )


@dataclass
class PaperState:
    step: int = FIRST

    def snapshot(self) -> Snapshot:
        return Snapshot({})
