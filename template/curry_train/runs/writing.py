"""Write and commit one checkpoint: its folder, the part of each rank, and the manifest.

On storage with rename, everything is written and synced under another name, then renamed. Without
rename, the manifest is written last. Either way, a checkpoint counts once its manifest verifies,
and no earlier checkpoint is touched before.
Proof: `python -m pytest tests/test_store_kill.py`.
"""

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import SaveError
from .files import Files
from .hashing_writer import HashingFolder, Part
from .manifest import MANIFEST, FileEntry, Manifest
from .names import BEST, Metric, folder_name
from .ranks import Ranks
from .safetensors_file import SafetensorsLayout
from .sharded import ShardedLayout
from .snapshot import Snapshot

VALUES = "state.json"
POLL_SECONDS = 0.05


class Writing:
    """One save: made on all ranks together; each rank writes its part, and the first commits."""

    def __init__(
        self,
        files: Files,
        ranks: Ranks,
        kind: str,
        step: int,
        metric: Metric | None,
        snapshot: Snapshot,
        *,
        folder: str,
        algorithm: str,
    ) -> None:
        self.files = files
        self.ranks = ranks
        self.kind = kind
        self.step = step
        self.metric = metric
        self.final = folder_name(kind, step, metric)
        self.folder = folder

        self._new = HashingFolder(files, self.folder, algorithm)
        layout = SafetensorsLayout if kind == BEST else ShardedLayout
        self._layout = layout(snapshot, self._new, ranks)
        self._values = ranks.exchange(
            lambda: snapshot.rank_values, lambda gathered: [gathered] * ranks.size
        )
        self._shared = snapshot.values
        self._ties = snapshot.ties
        self.optimizers = snapshot.optimizers

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The live tensors that this rank writes."""
        return self._layout.tensors

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, tensors: Sequence[Tensor] | None = None) -> Part:
        """Write this rank's files, from the live tensors or from copies of them."""
        free = self.files.free_bytes()
        if free is not None and free < self.num_bytes:
            raise SaveError(
                f"{self.files.location('')} has {free:,} bytes left, but the save needs "
                f"{self.num_bytes:,}: free some space, or keep fewer checkpoints"
            )
        return self._layout.write(self.tensors if tensors is None else tensors)

    def leave_part(self, part: Part | None, error: str = "") -> None:
        """Leave this rank's part for the first rank as a file in the folder.

        It replaces a collective call where the ranks can't make one.
        """
        text = json.dumps({"error": error, "part": part.to_json() if part else None})
        try:
            self.files.write(self._note(self.ranks.rank), text.encode())
        except FileNotFoundError as missing:
            raise SaveError("the first rank abandoned this save: see its error") from missing

    def collect_parts(self, own: Part, *, timeout: float) -> list[Part]:
        """Wait for the parts of all ranks, and return them."""
        parts = [own]
        deadline = time.monotonic() + timeout
        for rank in range(1, self.ranks.size):
            note = self._note(rank)
            while self.files.kind(note) is None or not self.files.size(note):
                if time.monotonic() > deadline:
                    raise SaveError(
                        f"rank {rank} has not written its part of {self.final} within "
                        f"{timeout:.0f} s"
                    )
                time.sleep(POLL_SECONDS)
            parts.append(self._part_of(rank, deadline))
        return parts

    def _part_of(self, rank: int, deadline: float) -> Part:
        while True:
            try:
                content = json.loads(self.files.read(self._note(rank)))
                break
            except ValueError:
                # The rank is still writing its note.
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)
        if content["error"]:
            raise SaveError(f"rank {rank}: {content['error']}")
        self.files.remove_file(self._note(rank))
        return Part.from_json(content["part"])

    def _note(self, rank: int) -> str:
        return f"{self.folder}/rank-{rank}.part"

    def commit(self, parts: list[Part]) -> Manifest:
        """Write the manifest and rename the folder; called on the first rank after all parts."""
        entries: dict[str, FileEntry] = {}
        for part in parts:
            entries |= part.files
        entries |= self._layout.join(parts)

        values: Mapping[str, Any] = {
            "values": self._shared,
            "ranks": self._values,
            "ties": self._ties,
        }
        with self._new.create(VALUES) as stream:
            stream.write(json.dumps(values, allow_nan=False).encode())
        entries[VALUES] = self._new.entries[VALUES]

        about = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__.split("+")[0],
            "world_size": self.ranks.size,
        }
        manifest = Manifest(self._new.algorithm, self.kind, self.step, entries, self.metric, about)
        self.files.write(f"{self.folder}/{MANIFEST}", manifest.render())
        self.files.sync_folder(self.folder)

        if self.folder != self.final:
            self.files.rename(self.folder, self.final)
        self.files.sync_folder(self.kind)
        return manifest
