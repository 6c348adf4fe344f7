"""Write and read checkpoint files: hashed while written, read without running pickles.

The hash needs no second read. Every rank records its part: the names, sizes and hashes of its
files, and the positions of its tensors in them. Private names of torch's checkpoint code are used
only in this module. Tests load the files written here with plain
`torch.distributed.checkpoint`.

Proof: `python -m pytest tests/runs/test_store.py tests/runs/test_store_hostile.py`.
"""

import contextlib
import dataclasses
import importlib
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .files import StrPath, create
from .layout import FileEntry, SavedCheckpoint, entry_of
from .ranks import HostileCheckpoint, Ranks, SaveError, reading
from .values import PLAIN_DTYPES, Facts, Values

# Write torch distributed checkpoints to any `Files`, hashing every file on the way.

METADATA_FILE_NAME = ".metadata"


def readable(data: bytes, most_bytes: int, what: str) -> bytes:
    """Return the data; raise SaveError if a load would refuse so much."""
    if len(data) > most_bytes:
        raise SaveError(
            f"{what} takes {len(data):,} bytes, and {most_bytes:,} are the most that a load reads: "
            f"keep long lists as tensors or arrays, and small tensors together"
        )
    return data


# Read a distributed checkpoint without running code from its files.

MOST_DIMENSIONS = 64


def checked_index(index: Any, manifest: SavedCheckpoint) -> tuple[dict[str, Tensor], Metadata]:
    """Return a tensor without memory for each that is saved, and the index for torch's reader.

    The tensors take no more bytes than the files hold.
    """
    shapes: dict[str, Tensor] = {}
    tensors: Facts = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    left = {name: entry.bytes for name, entry in manifest.files.items()}
    for name, (dtype, whole_shape, pieces) in index.items():
        if dtype not in PLAIN_DTYPES:
            raise HostileCheckpoint(f"{name!r:.80} has no dtype of a tensor, but {dtype!r:.40}")
        shape = _read_size(whole_shape)
        num_elements = 0
        chunks = []
        for offsets, sizes, file, position, length in pieces:
            chunk = ChunkStorageMetadata(_read_size(offsets), _read_size(sizes))
            num_elements += math.prod(chunk.sizes)
            corners = zip(chunk.offsets, chunk.sizes, shape, strict=True)
            is_inside = all(begin + size <= whole for begin, size, whole in corners)
            position, length = _read_size([position, length])
            left[file] -= length
            is_inside &= position + length <= manifest.files[file].bytes and left[file] >= 0
            if not is_inside or math.prod(chunk.sizes) * dtype.itemsize > length:
                raise HostileCheckpoint(
                    f"a piece of {name:.80} is outside of the tensor or of {file}, or on another"
                )
            chunks.append(chunk)
            storage[MetadataIndex(name, chunk.offsets)] = _StorageInfo(file, position, length)
        if num_elements != math.prod(shape):
            raise HostileCheckpoint(f"the pieces of {name:.80} are not the whole tensor")
        shapes[name] = torch.empty(shape, dtype=dtype, device="meta")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
    return shapes, Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())


def _read_size(numbers: Any) -> torch.Size:
    is_size = isinstance(numbers, list | tuple) and len(numbers) <= MOST_DIMENSIONS
    if not is_size or any(type(one) is not int or not 0 <= one < 2**62 for one in numbers):
        raise HostileCheckpoint(f"{numbers!r:.80} is not a shape")
    return torch.Size(numbers)


def read_tensors(folder: Path, metadata: Metadata, targets: Mapping[str, Tensor]) -> None:
    """Fill the targets, in any sharding, from two threads.

    Each rank reads what it needs, and no rank waits for another. Torch reads a tensor into new
    memory and copies it from there: a second thread makes up for the time that the verification
    took, and costs the memory of one more tensor.
    """
    reader = FileSystemReader(folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), metadata, False)
    reader.set_up_storage_reader(metadata, False)
    plan = planner.create_local_plan()
    halves = [dataclasses.replace(plan, items=plan.items[start::2]) for start in (0, 1)]
    what = f"{folder}: tensors can't be read"
    damage = reading(what, RuntimeError, AssertionError)
    with ThreadPoolExecutor(len(halves)) as pool, damage:
        for future in [pool.submit(reader.read_data, half, planner) for half in halves]:
            future.result().wait()


# Types that a training state and the store exchange: snapshots and contents.

# The prefix of the model's own tensors; a best-K holds only these.
MODEL_PREFIX = "model."


@dataclass(frozen=True)
class Snapshot:
    """A training state at one moment."""

    # The live tensors. A name that exists on several ranks holds equal values or shards.
    tensors: Mapping[str, Tensor]
    # The values of the first rank.
    values: Values
    # The values of each rank.
    rank_values: Values
    # What tensors hold that are saved among the values.
    inline: Mapping[str, Tensor]
    # Only these change the tensors: a copy in the background has to end before their next step.
    optimizers: Sequence[Any]
    # Which of the tensors are parameters.
    parameters: Collection[str]

    def snapshot(self) -> "Snapshot":
        """Return this snapshot, so that several saves of one step share it."""
        return self


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, without the values of its tensors."""

    # Only their shapes and dtypes count.
    tensors: Mapping[str, Tensor]
    values: Values
    rank_values: Sequence[Values]
    # Fills tensors with the saved values.
    fill: Callable[[Mapping[str, Tensor]], None]
    # True for a best-K.
    model_only: bool = False


# One save, prepared on all ranks: each writes its part, and then the first one commits.


@dataclass
class PreparedSave:
    """A save and its folder for torch's writer; new files are hashed, and synced when closed."""

    # The checkpoint as it will be committed, still without its files.
    saved: SavedCheckpoint
    snapshot: Snapshot
    folder: Path
    ranks: Ranks
    entries: dict[str, FileEntry] = field(default_factory=dict)
    # The tensors that this rank writes, by name or place; the caller may put copies in their place.
    tensors: dict[Any, Tensor] = field(default_factory=dict)

    def concat_path(self, path: StrPath, suffix: str) -> str:
        return suffix

    @contextlib.contextmanager
    def create_stream(self, name: str, mode: str = "wb") -> Iterator[Any]:
        with create(self.folder / name) as stream:
            try:
                yield stream
            except RuntimeError as error:
                # Torch's zip writer hides the error of a full disk behind "unexpected pos".
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise
            self.entries[name] = FileEntry(stream.tell(), stream.hash.hexdigest())


# Best-K checkpoints: the parameters as one safetensors file that other tools can read.

SAFETENSORS_FILE_NAME = "model.safetensors"
# The entry of the header that is no tensor.
SAFETENSORS_NOTES = "__metadata__"
# Dtypes of numbers that some version of the library can't write.
NOT_IN_SAFETENSORS = {
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}


@dataclass
class SafetensorsSave(PreparedSave):
    """The model's unsharded tensors, written by the first rank.

    What a safetensors file can't hold, by its dtype or name, is among the values of the state.
    """

    def __post_init__(self) -> None:
        self._others: dict[str, Tensor] = {}
        for name, tensor in self.snapshot.tensors.items():
            if not name.startswith(MODEL_PREFIX):
                continue
            # Every rank gathers its shards; the first one keeps the whole tensor, on the host.
            gather = getattr(tensor, "full_tensor", None)
            value: Tensor = tensor if gather is None else gather()
            if not self.ranks.first:
                continue
            if gather is not None:
                value = value.cpu()
            bare = name.removeprefix(MODEL_PREFIX)
            if value.dtype not in NOT_IN_SAFETENSORS and bare != SAFETENSORS_NOTES:
                self.tensors[bare] = value
            else:
                self._others[bare] = value.detach().clone()

    def write(self) -> dict[MetadataIndex, Any]:
        """Write this rank's files."""
        if self.ranks.first:
            contents = {name: _copy_to_own_memory(one) for name, one in self.tensors.items()}
            path = self.folder / SAFETENSORS_FILE_NAME
            save_file(contents, path, metadata={"format": "pt"})
            self.entries[SAFETENSORS_FILE_NAME] = entry_of(path)
        return {}

    def join(self, places: Iterable[Any]) -> Facts:
        """Return what the state holds of the tensors; called on the first rank."""
        return {"others": self._others}


def _copy_to_own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor on the host that shares its memory with no other, as the library wants."""
    one = tensor.detach().cpu().contiguous()
    return one if one.untyped_storage().nbytes() == one.nbytes else one.clone()


def read_best(folder: Path, others: Any) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file, whose header the library checks, into memory."""
    where = folder / SAFETENSORS_FILE_NAME
    with reading(f"{where}: the header can't be read", SafetensorError):
        found = {**load_file(where), **others}
        return {MODEL_PREFIX + name: tensor.detach() for name, tensor in found.items()}


def copy_into(targets: Values, values: Mapping[str, Tensor]) -> None:
    """Fill the targets, sharded or not."""
    for name, target in targets.items():
        value = values[name]
        if hasattr(target, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = target.device_mesh, target.placements
            value = distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None)
        target.detach().copy_(value)


# Sharded checkpoints in torch.distributed.checkpoint's format, for any number of ranks.


@dataclass
class ShardedSave(PreparedSave):
    """The tensors that this rank writes, in order."""

    def __post_init__(self) -> None:
        # Of a tensor that several ranks hold, the lowest rank's copy is saved, because data
        # parallelism broadcasts from the first rank.
        planner: Any = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )
        self._metadata: Any = None
        # The save hashes its files and syncs them itself. It has those methods of torch's file
        # system that the writer calls, and torch's type asks for all of them.
        self._writer = FileSystemWriter("", sync_files=False)
        self._writer.fs = self  # type: ignore[assignment]

        def local() -> Any:
            planner.set_up_planner(dict(self.snapshot.tensors), is_coordinator=self.ranks.first)
            return planner.create_local_plan()

        def central(plans: list[Any]) -> list[Any]:
            plans, self._metadata = planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        self._plan = planner.finish_plan(self.ranks.exchange(local, central))
        for item in self._plan.items:
            self.tensors[item.index] = planner.resolve_data(item).detach()

    def write(self) -> dict[MetadataIndex, Any]:
        """Write this rank's files; return the places of the tensors."""
        # All that torch's writer asks of a planner: in place of a live tensor, its copy.
        planner: Any = SimpleNamespace(resolve_data=lambda item: self.tensors[item.index])
        # The manifest has a better hash than CRC-32 sums, which take as long as the writing.
        config: Any = importlib.import_module("torch.utils.serialization.config")
        with config.patch("save.compute_crc32", False):
            written = self._writer.write_data(self._plan, planner).wait()
        return {one.index: one.storage_data for one in written}

    def join(self, places: Iterable[Any]) -> Facts:
        """Write torch's index of all ranks; return ours, which is read without unpickling."""
        found = {index: place for one in places for index, place in one.items()}
        # The index contains no path of this machine.
        metadata = dataclasses.replace(
            self._metadata,
            storage_data=found,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        with self.create_stream(METADATA_FILE_NAME) as stream:
            pickle.dump(metadata, stream)
        # Dtype, shape and pieces of each tensor, a piece with its place in the files.
        index = {}
        for name, entry in metadata.state_dict_metadata.items():
            pieces = []
            for chunk in entry.chunks:
                place = found[MetadataIndex(name, chunk.offsets)]
                where = [place.relative_path, place.offset, place.length]
                pieces.append([chunk.offsets, chunk.sizes, *where])
            index[name] = [entry.properties.dtype, entry.size, pieces]
        return {"index": index}


Writing = SafetensorsSave | ShardedSave
