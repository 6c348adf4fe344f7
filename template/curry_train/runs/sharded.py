"""Sharded checkpoints in torch.distributed.checkpoint's format, for any number of ranks.

The ranks plan together; then each writes its part alone, from the live tensors or from copies, and
the first rank joins the parts.
Proof: `python -m pytest tests/test_store_ranks.py`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from .hashing_writer import HashingFolder, HashingWriter, Part
from .manifest import FileEntry
from .ranks import Ranks
from .snapshot import Snapshot


class ShardedLayout:
    """The tensors that this rank writes, in order."""

    def __init__(self, snapshot: Snapshot, folder: HashingFolder, ranks: Ranks) -> None:
        # Of a tensor that several ranks hold, the lowest rank's copy is saved, because data
        # parallelism broadcasts from the first rank.
        planner = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )
        self._writer = HashingWriter(folder)
        self._metadata: Any = None

        def local() -> Any:
            planner.set_up_planner(dict(snapshot.tensors), is_coordinator=ranks.first)
            self._writer.set_up_storage_writer(ranks.first, rank=ranks.rank, use_collectives=True)
            return planner.create_local_plan()

        def central(plans: list[Any]) -> list[Any]:
            plans, self._metadata = planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        self._plan = planner.finish_plan(ranks.exchange(local, central))
        self.tensors: list[Tensor] = [
            _tensor(planner.resolve_data(item)) for item in self._plan.items
        ]

    def write(self, tensors: Sequence[Tensor]) -> Part:
        """Write these values in place of `self.tensors`."""
        return self._writer.write(self._plan, _Given(self._plan.items, tensors))

    def join(self, parts: list[Part]) -> dict[str, FileEntry]:
        """Write the file that joins all parts; called on the first rank after they are written."""
        entry = self._writer.write_metadata(self._metadata, parts)
        return {".metadata": entry}


class _Given:
    """Replaces torch's planner during the write: returns the given value of each item."""

    def __init__(self, items: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self._tensors = {item.index: tensor for item, tensor in zip(items, tensors, strict=True)}

    def resolve_data(self, item: Any) -> Tensor:
        return self._tensors[item.index]


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"only tensors and JSON can be saved, got a {type(value).__name__}")
    return value.detach()
