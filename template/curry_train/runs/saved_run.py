"""What is saved of a run, for whoever only reads: which checkpoints count, are they whole, load one.

Nothing here changes the disk or needs the lock, so another run's folder is read while that one writes.
Proof: `python -m pytest tests/test_store.py`.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from .errors import DamagedCheckpoint
from .files import Files, LocalFiles
from .manifest import Manifest, read_manifest, verify_files
from .names import BEST, KINDS, RESUMABLE, Saved, step_of
from .object_files import ObjectFiles
from .ranks import Ranks
from .safe_reader import facts_of, read_metadata, read_tensors
from .safetensors_file import SafetensorsReader
from .snapshot import Contents, LoadReport, State
from .writing import VALUES


class SavedRun:
    """`root` is a folder, or a URL that fsspec opens; `files` another way to reach it."""

    def __init__(self, root: str | os.PathLike[str], *, files: Files | None = None, group: Any = None) -> None:
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
        return max((saved for kind in RESUMABLE for saved in self.committed(kind)), key=_newness, default=None)

    def verify(self, checkpoint: Saved | str | os.PathLike[str]) -> Manifest:
        """Read every file again. Raises DamagedCheckpoint, which says what differs."""
        folder = self.folder_of(checkpoint)
        manifest = read_manifest(self.files, folder)
        verify_files(self.files, folder, manifest, manifest.files)
        return manifest

    def load(self, checkpoint: Saved | str | os.PathLike[str], state: State, *, strict: bool = True) -> LoadReport:
        """Verify, compare, and only then change the state. The ranks share the reading for the verification."""
        ranks, folder = Ranks(self.group), self.folder_of(checkpoint)

        def check() -> Manifest:
            manifest = read_manifest(self.files, folder)
            verify_files(self.files, folder, manifest, sorted(manifest.files)[ranks.rank :: ranks.size])
            return manifest

        manifest = ranks.all_do(check)
        values = self._values(folder)
        parts = values["values"], values["ranks"], values["ties"]
        if manifest.kind == BEST:
            reader = SafetensorsReader(self.files, folder)
            best = Contents(reader.facts(), *parts, model_only=True)
            loading = ranks.all_do(lambda: state.begin_load(best, strict=strict))
            reader.read_into(loading.targets)
        else:
            metadata = ranks.all_do(lambda: read_metadata(self.files, folder, manifest))
            loading = ranks.all_do(lambda: state.begin_load(Contents(facts_of(metadata), *parts), strict=strict))
            read_tensors(self.files, folder, metadata, loading.targets)
        loading.finish()
        return loading.report

    def folder_of(self, checkpoint: Saved | str | os.PathLike[str]) -> str:
        """The folder of a checkpoint, relative to the run's; `checkpoint` may be a path, or `latest`."""
        given = checkpoint.folder if isinstance(checkpoint, Saved) else os.fspath(checkpoint).rstrip("/")
        if given == "latest":
            newest = self.latest()
            if newest is None:
                raise DamagedCheckpoint(f"{self.files.location('')} holds nothing to resume from: start the run anew")
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
            raise DamagedCheckpoint(f"{self.files.location(key)} can't be read ({error})") from error
        return dict(found)

    def _folders(self, kind: str) -> list[str]:
        return [f"{kind}/{name}" for name in self.files.names(kind) if step_of(kind, name) is not None]

    def _saved(self, folder: str, manifest: Manifest) -> Saved:
        location = self.files.location(folder)
        return Saved(manifest.kind, manifest.step, folder, location, manifest.metric, manifest.num_bytes)


def _newness(saved: Saved) -> tuple[int, bool]:
    return saved.step, saved.kind == "recovery"
