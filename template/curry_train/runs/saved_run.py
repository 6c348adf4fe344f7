"""What is saved of a run, for whoever only reads: which checkpoints count, are they whole, load one.

Nothing here changes the disk or needs the lock, so another run's folder is read while that one writes.
Proof: `python -m pytest tests/test_store.py`.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .errors import DamagedCheckpoint
from .files import Files, LocalFiles
from .manifest import Manifest, read_manifest, verify_files
from .names import BEST, KINDS, RESUMABLE, Saved, step_of
from .object_files import ObjectFiles
from .ranks import Ranks
from .reading import reading
from .safe_reader import facts_of, read_metadata, read_tensors
from .safetensors_file import SafetensorsReader
from .snapshot import Contents, LoadReport, State
from .writing import VALUES


class SavedRun:
    """`root` is a folder, or a URL that fsspec opens; `files` another way to reach it."""

    def __init__(
        self, root: str | os.PathLike[str], *, files: Files | None = None, group: Any = None
    ) -> None:
        self.files = files or (ObjectFiles(str(root)) if "://" in str(root) else LocalFiles(root))
        self.group = group

    def committed(self, kind: str) -> list[Saved]:
        """The checkpoints of a kind, by step: those whose manifests hold, with files of the right sizes."""
        found = []
        for folder in self._folders(kind):
            with contextlib.suppress(DamagedCheckpoint):
                found.append(self._saved(folder, read_manifest(self.files, folder)))
        return sorted(found, key=lambda saved: saved.step)

    def damaged(self, kind: str) -> dict[str, str]:
        """Why each of the others does not count, as far as that shows without reading all of them."""
        found = {}
        for folder in self._folders(kind):
            try:
                read_manifest(self.files, folder)
            except DamagedCheckpoint as error:
                found[folder] = str(error)
        return found

    def latest(self) -> Saved | None:
        """The newest that training can resume from."""
        return max(
            (saved for kind in RESUMABLE for saved in self.committed(kind)),
            key=_newness,
            default=None,
        )

    def verify(self, checkpoint: Saved | str | os.PathLike[str]) -> Manifest:
        """Read every file again. Raises DamagedCheckpoint, which says what differs."""
        folder = self.folder_of(checkpoint)
        with reading(self.files, folder):
            manifest = read_manifest(self.files, folder)
            verify_files(self.files, folder, manifest, manifest.files)
        return manifest

    def load(
        self, checkpoint: Saved | str | os.PathLike[str], state: State, *, strict: bool = True
    ) -> LoadReport:
        """Verify, compare, and only then change the state. The ranks share the reading for the verification, and what
        fails on one of them is raised on all. An error while values are read leaves a state that is to be loaded anew.
        """
        ranks = Ranks(self.group)
        folder = ranks.agree(lambda: self.folder_of(checkpoint))
        with reading(self.files, folder):
            return self._load(folder, state, ranks, strict=strict)

    def _load(self, folder: str, state: State, ranks: Ranks, *, strict: bool) -> LoadReport:
        def check() -> Manifest:
            manifest = read_manifest(self.files, folder)
            verify_files(
                self.files, folder, manifest, sorted(manifest.files)[ranks.rank :: ranks.size]
            )
            return manifest

        manifest = ranks.all_do(check)
        content = ranks.all_do(lambda: self._open_content(folder, manifest))
        loading = ranks.all_do(lambda: state.begin_load(content.contents, strict=strict))
        ranks.all_do(lambda: self._fill(folder, content, loading.targets))
        ranks.all_do(loading.finish)
        return loading.report

    def _open_content(self, folder: str, manifest: Manifest) -> "_Content":
        """What is in a checkpoint that was verified, before a value of it is read."""
        try:
            values = self._values(folder)
            parts = values["values"], values["ranks"], values["ties"]
            if manifest.kind == BEST:
                reader = SafetensorsReader(self.files, folder)
                return _Content(Contents(reader.facts(), *parts, model_only=True), reader.read_into)
            metadata = read_metadata(self.files, folder, manifest)
        except OSError as error:
            raise DamagedCheckpoint(
                f"{self.files.location(folder)} can't be read ({error})"
            ) from error
        fill = functools.partial(read_tensors, self.files, folder, metadata)
        return _Content(Contents(facts_of(metadata), *parts), fill)

    def _fill(self, folder: str, content: "_Content", targets: Mapping[str, Tensor]) -> None:
        try:
            content.read_into(targets)
        except OSError as error:
            raise DamagedCheckpoint(
                f"{self.files.location(folder)}: tensors can't be read ({error})"
            ) from error

    def folder_of(self, checkpoint: Saved | str | os.PathLike[str]) -> str:
        """The folder of a checkpoint, relative to the run's; `checkpoint` may be a path, or `latest`."""
        given = (
            checkpoint.folder
            if isinstance(checkpoint, Saved)
            else os.fspath(checkpoint).rstrip("/")
        )
        if given == "latest":
            newest = self.latest()
            if newest is None:
                raise DamagedCheckpoint(
                    f"{self.files.location('')} holds nothing to resume from: start the run anew"
                )
            return newest.folder
        folder = given.removeprefix(self.files.location("").rstrip("/") + "/")
        kind, _, name = folder.partition("/")
        if kind not in KINDS or step_of(kind, name) is None:
            raise ValueError(
                f"{given} is no checkpoint of {self.files.location('')}, such as rollback/step-00000500.dcp: for one "
                f"of another run, make a SavedRun of that run's folder"
            )
        return folder

    def values(self, checkpoint: Saved | str | os.PathLike[str]) -> Mapping[str, Any]:
        """The state beside the tensors: step, position, configuration and so on, as JSON."""
        found: Mapping[str, Any] = self._values(self.folder_of(checkpoint))["values"]
        return found

    def _values(self, folder: str) -> dict[str, Any]:
        key = f"{folder}/{VALUES}"
        try:
            found = json.loads(self.files.read(key))
            if not isinstance(found["values"], dict) or not isinstance(found["ranks"], list):
                raise ValueError("not the values of a state")
            for name, first in found["ties"].items():
                if not isinstance(name, str) or not isinstance(first, str):
                    raise ValueError("ties are not names")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"{self.files.location(key)} can't be read ({error})"
            ) from error
        return dict(found)

    def _folders(self, kind: str) -> list[str]:
        return [
            f"{kind}/{name}" for name in self.files.names(kind) if step_of(kind, name) is not None
        ]

    def _saved(self, folder: str, manifest: Manifest) -> Saved:
        location = self.files.location(folder)
        return Saved(
            manifest.kind, manifest.step, folder, location, manifest.metric, manifest.num_bytes
        )


@dataclass(frozen=True)
class _Content:
    contents: Contents
    read_into: Callable[[Mapping[str, Tensor]], None]


def _newness(saved: Saved) -> tuple[int, bool]:
    return saved.step, saved.kind == "recovery"
