"""Best-K checkpoints: the parameters as one safetensors file that other tools can read.

The file is written tensor by tensor and hashed while it is written. The safetensors package can
only write all tensors at once, to a local path, without a hash. Tests compare files written and
read here with that package.
Proof: `python -m pytest tests/test_store_best.py`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .errors import DamagedCheckpoint
from .files import Files
from .hashing_writer import HashingFolder, Part
from .manifest import FileEntry
from .ranks import Ranks
from .safe_reader import TensorFacts
from .snapshot import MODEL, Snapshot

NAME = "model.safetensors"
LONGEST_HEADER = 100 * 2**20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LETTERS = {dtype: letters for letters, dtype in DTYPES.items()}


class SafetensorsLayout:
    """The model's unsharded tensors, written by the first rank.

    The widest dtypes come first, so that every tensor starts at a multiple of its item size.
    """

    def __init__(self, snapshot: Snapshot, folder: HashingFolder, ranks: Ranks) -> None:
        parameters = {
            name.removeprefix(MODEL): tensor
            for name, tensor in snapshot.tensors.items()
            if name.startswith(MODEL)
        }
        for name, tensor in parameters.items():
            if tensor.dtype not in LETTERS or tensor.layout is not torch.strided:
                raise ValueError(
                    f"safetensors can't hold {name}: {tensor.dtype}, {tensor.layout}; save the "
                    f"model without it, or set best_k to 0"
                )
        self._names = sorted(parameters, key=lambda name: (-parameters[name].dtype.itemsize, name))
        self._folder = folder
        self._first = ranks.first
        unsharded = [_whole(parameters[name], keep=ranks.first) for name in self._names]
        self.tensors: list[Tensor] = [tensor for tensor in unsharded if tensor is not None]

    def write(self, tensors: Sequence[Tensor]) -> Part:
        """Write these values in place of `self.tensors`."""
        if not self._first:
            return Part({})

        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, tensor in zip(self._names, tensors, strict=True):
            end = position + tensor.nbytes
            header[name] = {
                "dtype": LETTERS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)

        with self._folder.create(NAME) as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                if tensor.numel():
                    stream.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return Part(self._folder.entries)

    def join(self, parts: list[Part]) -> dict[str, FileEntry]:
        return {}


def _whole(tensor: Tensor, *, keep: bool) -> Tensor | None:
    """Gather a tensor that may be sharded; the rank with `keep` gets it, in host memory.

    Every rank has to call this.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor if keep else None
    full: Tensor = tensor.full_tensor()
    return full.cpu() if keep else None


class SafetensorsReader:
    """Reads a safetensors file; the header is validated against the size of the file."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._key = f"{folder}/{NAME}"
        self._where = files.location(self._key)
        with files.open(self._key) as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > LONGEST_HEADER:
                raise DamagedCheckpoint(
                    f"{self._where}: the header's length is {length:,} bytes, more than "
                    f"{LONGEST_HEADER:,}"
                )
            text = stream.read(length)
        self._start = 8 + length
        num_bytes = files.size(self._key)

        self._places: dict[str, tuple[TensorFacts, int]] = {}
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                facts = TensorFacts(tuple(map(int, entry["shape"])), DTYPES[entry["dtype"]])
                begin, end = entry["data_offsets"]
                size = math.prod(facts.shape) * facts.dtype.itemsize
                if (
                    min(facts.shape, default=0) < 0
                    or begin < 0
                    or end - begin != size
                    or self._start + end > num_bytes
                ):
                    raise ValueError(f"{name} can't be at bytes {begin} to {end}")
                self._places[name] = facts, begin
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{self._where}: the header can't be read ({error})") from error

    def facts(self) -> dict[str, TensorFacts]:
        """Return shape and dtype of each tensor, by its name in a state."""
        return {MODEL + name: facts for name, (facts, _) in self._places.items()}

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the targets, sharded or not."""
        with self._files.open(self._key) as stream:
            for name, target in sorted(targets.items(), key=lambda item: self._place(item[0])[1]):
                _copy(self._value(stream, name), target.detach())

    def _place(self, name: str) -> tuple[TensorFacts, int]:
        return self._places[name.removeprefix(MODEL)]

    def _value(self, stream: BinaryIO, name: str) -> Tensor:
        facts, begin = self._place(name)
        num_bytes = math.prod(facts.shape) * facts.dtype.itemsize
        stream.seek(self._start + begin)
        data = bytearray(stream.read(num_bytes))
        if len(data) != num_bytes:
            raise DamagedCheckpoint(f"{self._where} ends inside {name}")
        if not num_bytes:
            return torch.empty(facts.shape, dtype=facts.dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(facts.dtype).reshape(facts.shape)


def _copy(value: Tensor, target: Tensor) -> None:
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        place = target.to_local().device
        shard = distribute_tensor(
            value.to(place), target.device_mesh, target.placements, src_data_rank=None
        )
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(value)
