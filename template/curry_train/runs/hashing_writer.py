"""Torch's own writer of distributed checkpoints, over any `Files`, with a hash of every file made on the way.

The hash costs no second read. Each rank keeps its part: names, sizes and hashes of its files, and where in them its
tensors are. Private names of torch's checkpoint code stay in this module and in safe_reader; tests load what is
written here with plain `torch.distributed.checkpoint`. Proof: `python -m pytest tests/test_store.py`.
"""

import contextlib
import dataclasses
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from .digests import HashingStream
from .files import Files
from .manifest import FileEntry

METADATA = ".metadata"


@dataclass(frozen=True)
class Part:
    """What one rank wrote. `items` says of each tensor: name, offsets, number, file, position, length."""

    files: Mapping[str, FileEntry]
    items: tuple[tuple[Any, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Part":
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return cls(files, tuple(map(tuple, content["items"])))


class HashingFolder:
    """New files of one folder, hashed as they are written and synced when they are closed."""

    def __init__(self, files: Files, folder: str, algorithm: str) -> None:
        self.files, self.folder, self.algorithm = files, folder, algorithm
        self.entries: dict[str, FileEntry] = {}

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[HashingStream]:
        raw = self.files.create(f"{self.folder}/{name}")
        stream = HashingStream(raw, self.algorithm)
        try:
            yield stream
            self.files.finish(raw)
        except BaseException as error:
            self.files.abandon(raw)
            if stream.failed is not None and isinstance(error, Exception):
                raise stream.failed from error
            raise
        self.entries[name] = FileEntry(stream.num_bytes, stream.hexdigest())


class _TorchFiles(FileSystemBase):
    """What torch's writer asks of a file system."""

    def __init__(self, folder: HashingFolder) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._folder.create(os.fspath(path)) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("a file keeps its name here")

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing: the store has made the folder."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("nothing is removed here")


class HashingWriter(FileSystemWriter):
    """`write_data` as torch has it; `part` is what it left behind, `write_metadata` joins the parts of all ranks."""

    def __init__(self, folder: HashingFolder) -> None:
        super().__init__(
            "", sync_files=False
        )  # HashingFolder syncs; torch would sync the whole machine here
        self.fs: Any = _TorchFiles(folder)
        self.folder = folder

    def write(self, plan: Any, planner: Any) -> Part:
        results = self.write_data(plan, planner).value()
        return Part(self.folder.entries, tuple(map(_item, results)))

    def write_metadata(self, metadata: Metadata, parts: list[Part]) -> FileEntry:
        """The index of all tensors, without any path of this machine."""
        storage = dict(_place(item) for part in parts for item in part.items)
        metadata = dataclasses.replace(
            metadata, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
        )
        with self.folder.create(METADATA) as stream:
            stream.write(pickle.dumps(metadata))
        return self.folder.entries[METADATA]


def _item(result: WriteResult) -> tuple[Any, ...]:
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return index.fqn, offset, index.index, place.relative_path, place.offset, place.length


def _place(item: tuple[Any, ...]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset, number, file, position, length = item
    return MetadataIndex(name, offset, number), _StorageInfo(file, position, length)
