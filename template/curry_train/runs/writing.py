"""One checkpoint on its way to the disk: a folder of its own, each rank's part, and the commit that makes it count.

With rename: everything is written and synced under another name, then renamed. Without: the manifest is written last.
Either way a checkpoint counts once its manifest verifies, and until then nothing that counted is touched.
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
    """Made on every rank together; then each writes its part, and the first commits."""

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
        self.files, self.ranks, self.kind, self.step, self.metric = files, ranks, kind, step, metric
        self.final = folder_name(kind, step, metric)
        self.folder = folder
        self._new = HashingFolder(files, self.folder, algorithm)
        layout = SafetensorsLayout if kind == BEST else ShardedLayout
        self._layout = layout(snapshot, self._new, ranks)
        self._values = ranks.exchange(
            lambda: snapshot.rank_values, lambda every: [every] * ranks.size
        )
        self._shared, self._ties, self.optimizers = (
            snapshot.values,
            snapshot.ties,
            snapshot.optimizers,
        )

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The live tensors that this rank writes."""
        return self._layout.tensors

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, tensors: Sequence[Tensor] | None = None) -> Part:
        """This rank's files, from the live tensors or from copies of them."""
        free = self.files.free_bytes()
        if free is not None and free < self.num_bytes:
            raise SaveError(
                f"{self.files.location('')} has {free:,} bytes left, and {self.num_bytes:,} are needed"
            )
        return self._layout.write(self.tensors if tensors is None else tensors)

    def leave_part(self, part: Part | None, error: str = "") -> None:
        """Tell the first rank through the folder, where the ranks can't be asked together."""
        text = json.dumps({"error": error, "part": part.to_json() if part else None})
        try:
            self.files.write(self._note(self.ranks.rank), text.encode())
        except FileNotFoundError as missing:
            raise SaveError("the first rank gave this save up, and its error says why") from missing

    def collect_parts(self, own: Part, *, timeout: float) -> list[Part]:
        """The parts of all ranks, once each has left its own."""
        parts, until = [own], time.monotonic() + timeout
        for rank in range(1, self.ranks.size):
            while self.files.kind(self._note(rank)) is None or not self.files.size(
                self._note(rank)
            ):
                if time.monotonic() > until:
                    raise SaveError(
                        f"rank {rank} has not written its part of {self.final} within {timeout:.0f} s"
                    )
                time.sleep(POLL_SECONDS)
            parts.append(self._part_of(rank, until))
        return parts

    def _part_of(self, rank: int, until: float) -> Part:
        while True:
            try:
                content = json.loads(self.files.read(self._note(rank)))
                break
            except ValueError:  # it is being written
                if time.monotonic() > until:
                    raise
                time.sleep(POLL_SECONDS)
        if content["error"]:
            raise SaveError(f"rank {rank}: {content['error']}")
        self.files.remove_file(self._note(rank))
        return Part.from_json(content["part"])

    def _note(self, rank: int) -> str:
        return f"{self.folder}/rank-{rank}.part"

    def commit(self, parts: list[Part]) -> Manifest:
        """On the first rank, once all parts are on the disk."""
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
