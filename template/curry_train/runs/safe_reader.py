"""Read a distributed checkpoint without running code from its files.

Torch unpickles `.metadata` and every entry that is not a tensor, which runs any code they name.
Here only the names in ALLOWED are unpickled, an entry that is not a tensor is refused, and only
files of the manifest are read.
Proof: `python -m pytest tests/test_store_hostile.py`.
"""

import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .errors import DamagedCheckpoint, HostileCheckpoint
from .files import Files
from .hashing_writer import METADATA
from .manifest import Manifest

# Errors that torch.load raises on forged bytes.
FORGED = (
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    EOFError,
    AttributeError,
)
_CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED = {
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}


class _Allowing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise HostileCheckpoint(
            f"{METADATA} names {module}.{name}, which no checkpoint needs: don't load it with "
            f"other tools either"
        )


@dataclass(frozen=True)
class TensorFacts:
    """Shape and dtype of one saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def read_metadata(files: Files, folder: str, manifest: Manifest) -> Metadata:
    """Read and validate the index of a checkpoint."""
    location = files.location(folder)
    try:
        metadata = _Allowing(io.BytesIO(files.read(f"{folder}/{METADATA}"))).load()
        _check(metadata, manifest)
    except HostileCheckpoint as error:
        raise HostileCheckpoint(f"{location}: {error}") from error
    # A pickle of allowed classes in the wrong places can raise any of these.
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        ImportError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        raise DamagedCheckpoint(
            f"{location}: {METADATA} can't be read ({type(error).__name__}: {error})"
        ) from error
    checked: Metadata = metadata
    return checked


def _check(metadata: Any, manifest: Manifest) -> None:
    if type(metadata) is not Metadata or type(metadata.storage_data) is not dict:
        raise HostileCheckpoint(
            f"{METADATA} holds a {type(metadata).__name__}, not the index of a checkpoint"
        )
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise HostileCheckpoint(
                f"{name} is saved as a pickle, not as a tensor: only tensors and JSON are loaded"
            )
        _check_entry(name, entry)

    for index, place in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo:
            raise HostileCheckpoint(
                f"{METADATA} maps {index!r:.80} to {place!r:.80}, which are not a tensor's index "
                f"and its place in a file"
            )
        file = manifest.files.get(place.relative_path)
        if file is None:
            raise HostileCheckpoint(
                f"{index.fqn} is placed in {place.relative_path!r}, which is not a file of this "
                f"checkpoint"
            )
        if getattr(place, "transform_descriptors", None):
            raise HostileCheckpoint(
                f"{index.fqn} requires {place.transform_descriptors} to be run on it"
            )
        if not 0 <= place.offset <= place.offset + place.length <= file.bytes:
            raise HostileCheckpoint(f"{index.fqn} is placed outside of {place.relative_path}")


def _check_entry(name: Any, entry: TensorStorageMetadata) -> None:
    """Check the type of every field of an entry.

    Torch reads their attributes later, where no error is caught.
    """
    if type(entry.chunks) is not list or any(
        type(chunk) is not ChunkStorageMetadata for chunk in entry.chunks
    ):
        raise HostileCheckpoint(f"{name!r:.80} has invalid chunks: {entry.chunks!r:.80}")

    sizes = [entry.size]
    for chunk in entry.chunks:
        sizes += [chunk.offsets, chunk.sizes]
    if type(name) is not str or any(type(size) is not torch.Size for size in sizes):
        raise HostileCheckpoint(f"{name!r:.80} has an invalid name or size: {sizes!r:.80}")

    properties = entry.properties
    if type(properties) is not TensorProperties or type(properties.dtype) is not torch.dtype:
        raise HostileCheckpoint(f"{name!r:.80} has no valid dtype: {properties!r:.80}")


def facts_of(metadata: Metadata) -> dict[str, TensorFacts]:
    """Return shape and dtype of every tensor, by name."""
    return {
        name: TensorFacts(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class _TorchFiles:
    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    @contextlib.contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[Any]:
        with self._files.open(f"{self._folder}/{path}") as stream:
            yield stream


def read_tensors(
    files: Files, folder: str, metadata: Metadata, targets: Mapping[str, Tensor]
) -> None:
    """Fill the targets, in any sharding.

    Each rank reads what it needs, and no rank waits for another.
    """
    reader: Any = FileSystemReader("")
    reader.fs = _TorchFiles(files, folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), metadata, False)
    reader.set_up_storage_reader(metadata, False)
    plan = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])[0]
    try:
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, RuntimeError, AssertionError, pickle.UnpicklingError, *FORGED) as error:
        raise DamagedCheckpoint(
            f"{files.location(folder)}: tensors can't be read ({error})"
        ) from error
