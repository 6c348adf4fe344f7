"""Read-only access to a run: list, verify and load its checkpoints.

Nothing here changes the disk or needs the run's lock, so a run can be read while another process
writes it.
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
    """The checkpoints of the run at `root`, a folder or a URL that fsspec opens.

    `files` replaces the file access that is chosen from `root`.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, files: Files | None = None, group: Any = None
    ) -> None:
        self.files = files or (ObjectFiles(str(root)) if "://" in str(root) else LocalFiles(root))
        self.group = group

    def committed(self, kind: str) -> list[Saved]:
        """Return the checkpoints of a kind whose manifests and file sizes are valid, by step."""
        committed = []
        for folder in self._folders(kind):
            with contextlib.suppress(DamagedCheckpoint):
                committed.append(self._saved(folder, read_manifest(self.files, folder)))
        return sorted(committed, key=lambda saved: saved.step)

    def damaged(self, kind: str) -> dict[str, str]:
        """Return the folders of a kind that `committed` leaves out, with the reason.

        Damage inside a file of the right size is found by `verify` only.
        """
        reasons = {}
        for folder in self._folders(kind):
            try:
                read_manifest(self.files, folder)
            except DamagedCheckpoint as error:
                reasons[folder] = str(error)
        return reasons

    def latest(self) -> Saved | None:
        """Return the newest checkpoint that training can resume from."""
        resumable = [saved for kind in RESUMABLE for saved in self.committed(kind)]
        return max(resumable, key=_newness, default=None)

    def verify(self, checkpoint: Saved | str | os.PathLike[str]) -> Manifest:
        """Read and hash every file; raise DamagedCheckpoint with the difference."""
        folder = self.folder_of(checkpoint)
        with reading(self.files, folder):
            manifest = read_manifest(self.files, folder)
            verify_files(self.files, folder, manifest, manifest.files)
        return manifest

    def load(
        self, checkpoint: Saved | str | os.PathLike[str], state: State, *, strict: bool = True
    ) -> LoadReport:
        """Verify a checkpoint, compare it with the state, and only then change the state.

        The ranks share the reading for the verification, and an error on one of them is raised on
        all. After an error while values are read, the state has to be loaded again.
        """
        ranks = Ranks(self.group)
        folder = ranks.agree(lambda: self.folder_of(checkpoint))
        with reading(self.files, folder):
            return self._load(folder, state, ranks, strict=strict)

    def _load(self, folder: str, state: State, ranks: Ranks, *, strict: bool) -> LoadReport:
        def check() -> Manifest:
            manifest = read_manifest(self.files, folder)
            own_share = sorted(manifest.files)[ranks.rank :: ranks.size]
            verify_files(self.files, folder, manifest, own_share)
            return manifest

        manifest = ranks.all_do(check)
        content = ranks.all_do(lambda: self._open_content(folder, manifest))
        loading = ranks.all_do(lambda: state.begin_load(content.contents, strict=strict))
        ranks.all_do(lambda: self._fill(folder, content, loading.targets))
        ranks.all_do(loading.finish)
        return loading.report

    def _open_content(self, folder: str, manifest: Manifest) -> "_Content":
        """Open a verified checkpoint, without reading the values of its tensors."""
        try:
            found = self._values(folder)
            values = found["values"]
            rank_values = found["ranks"]
            ties = found["ties"]
            if manifest.kind == BEST:
                reader = SafetensorsReader(self.files, folder)
                contents = Contents(reader.facts(), values, rank_values, ties, model_only=True)
                return _Content(contents, reader.read_into)
            metadata = read_metadata(self.files, folder, manifest)
        except OSError as error:
            raise DamagedCheckpoint(
                f"{self.files.location(folder)} can't be read ({error})"
            ) from error
        contents = Contents(facts_of(metadata), values, rank_values, ties)
        return _Content(contents, functools.partial(read_tensors, self.files, folder, metadata))

    def _fill(self, folder: str, content: "_Content", targets: Mapping[str, Tensor]) -> None:
        try:
            content.read_into(targets)
        except OSError as error:
            raise DamagedCheckpoint(
                f"{self.files.location(folder)}: tensors can't be read ({error})"
            ) from error

    def folder_of(self, checkpoint: Saved | str | os.PathLike[str]) -> str:
        """Return the folder, relative to the run, of a checkpoint, a path or `latest`."""
        if isinstance(checkpoint, Saved):
            given = checkpoint.folder
        else:
            given = os.fspath(checkpoint).rstrip("/")

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
                f"{given} is not a checkpoint of {self.files.location('')}, such as "
                f"rollback/step-00000500.dcp: for one of another run, make a SavedRun of that "
                f"run's folder"
            )
        return folder

    def values(self, checkpoint: Saved | str | os.PathLike[str]) -> Mapping[str, Any]:
        """Return the non-tensor state as JSON: step, position, configuration and so on."""
        values: Mapping[str, Any] = self._values(self.folder_of(checkpoint))["values"]
        return values

    def _values(self, folder: str) -> dict[str, Any]:
        key = f"{folder}/{VALUES}"
        try:
            found = json.loads(self.files.read(key))
            if not isinstance(found["values"], dict) or not isinstance(found["ranks"], list):
                raise ValueError("it does not hold the values of a state")
            for name, first in found["ties"].items():
                if not isinstance(name, str) or not isinstance(first, str):
                    raise ValueError("its ties are not pairs of names")
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
