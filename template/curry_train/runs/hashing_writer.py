"""Write torch distributed checkpoints to any `Files`, hashing every file on the way.

The hash needs no second read. Every rank records its part: the names, sizes and hashes of its
files, and the positions of its tensors in them. Private names of torch's checkpoint code are used
only in this module and in safe_reader. Tests load the files written here with plain
`torch.distributed.checkpoint`.
Proof: `python -m pytest tests/test_store.py`.
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
    """The files and tensors that one rank wrote."""

    files: Mapping[str, FileEntry]
    # Name, offsets, number, file, position and length of each tensor.
    items: tuple[tuple[Any, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Part":
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return cls(files, tuple(map(tuple, content["items"])))


class HashingFolder:
    """A folder whose new files are hashed while they are written, and synced when closed."""

    def __init__(self, files: Files, folder: str, algorithm: str) -> None:
        self.files = files
        self.folder = folder
        self.algorithm = algorithm
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
    """The file system interface of torch's checkpoint writer, on top of a HashingFolder."""

    def __init__(self, folder: HashingFolder) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._folder.create(os.fspath(path)) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("files of a checkpoint are never renamed")

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the store has already made the folder."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("files of a checkpoint are never removed one by one")


class HashingWriter(FileSystemWriter):
    """Torch's checkpoint writer over a HashingFolder.

    `write` returns the part of this rank, and `write_metadata` joins the parts of all ranks.
    """

    def __init__(self, folder: HashingFolder) -> None:
        # HashingFolder syncs its files. Torch would sync all file systems of the machine.
        super().__init__("", sync_files=False)
        self.fs: Any = _TorchFiles(folder)
        self.folder = folder

    def write(self, plan: Any, planner: Any) -> Part:
        results = self.write_data(plan, planner).value()
        return Part(self.folder.entries, tuple(map(_item, results)))

    def write_metadata(self, metadata: Metadata, parts: list[Part]) -> FileEntry:
        """Write the index of all tensors; it contains no path of this machine."""
        storage = dict(_place(item) for part in parts for item in part.items)
        metadata = dataclasses.replace(
            metadata, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
        )
        with self.folder.create(METADATA) as stream:
            stream.write(pickle.dumps(metadata))
        return self.folder.entries[METADATA]


def _item(result: WriteResult) -> tuple[Any, ...]:
    index = result.index
    place = result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return index.fqn, offset, index.index, place.relative_path, place.offset, place.length


def _place(item: tuple[Any, ...]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset, number, file, position, length = item
    return MetadataIndex(name, offset, number), _StorageInfo(file, position, length)
