"""Read the tensors of files that other programs wrote, without unpickling anything.

Files of `torch.save` (the zip format and the one before it), Lightning's `.ckpt`, safetensors and
plain pickles. Values are streamed: a tensor of any size is counted in pieces. What a format can't
prove is listed as unknown, and a damaged or forged file becomes a problem in one line.

Proof: `python -m pytest tests/cli/test_inspection.py`.
"""

import dataclasses
import json
import math
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..core.unpickle import PickleReader, RefusedPickle, StandIn
from ..runs.format import SAFETENSORS_DTYPES

# Findings in a file.

# Bytes that are read at a time, and the most of a strided view that is read at once.
PIECE_BYTES = 2**24
MOST_STRIDED_BYTES = 2**28
# An index or a pickle inside of a file is read whole; a larger one is not read at all.
MOST_INDEX_BYTES = 2**25
MOST_PICKLE_BYTES = 2**28
# Keys of nested containers that are visited; shared containers could give endlessly many.
MOST_KEYS = 500_000
DEEPEST_KEY_PATH = 60


@dataclass
class FoundTensor:
    """One tensor of a file; `nan` and `inf` are None where its values were not read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nan: int | None = None
    inf: int | None = None
    # Why the values could not be read.
    problem: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class FileContent:
    """The content of one file, or of a part of one."""

    format: str = "unknown"
    tensors: list[FoundTensor] = field(default_factory=list)
    # Other values by key, each in a few words.
    values: dict[str, str] = field(default_factory=dict)
    # Classes and functions that unpickling would import.
    names: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    # Questions that the format leaves open.
    unknown: list[str] = field(default_factory=list)
    # Records whose checksum was compared with their bytes.
    num_hashed: int = 0
    algorithm: str = ""


class _Damaged(ValueError):
    """A file that is not what its format requires."""


class Region:
    """A part of a file as a read-only stream; a single read is limited in size."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._position = 0
        self.length = length

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning of the file")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self.length - self._position, 0)
        size = left if size < 0 else min(size, left)
        if size > MOST_PICKLE_BYTES:
            raise _Damaged(f"an index of {size:,} bytes is too large to be read")
        self._stream.seek(self._start + self._position)
        data = self._stream.read(size)
        self._position += len(data)
        return data

    def pieces(self, begin: int, length: int) -> Iterator[bytes]:
        """Yield these bytes in pieces; raise if the region ends before."""
        position = begin
        end = begin + length
        while position < end:
            self.seek(position)
            piece = self.read(min(PIECE_BYTES, end - position))
            if not piece:
                raise _Damaged(f"it ends at byte {position:,}, inside of a value")
            yield piece
            position += len(piece)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file; a pipe or a device would block or never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def read_tensor_file(path: str | os.PathLike[str], *, values: bool = True) -> FileContent:
    """Read one file of tensors; without `values`, NaN and inf are not counted."""
    with open_regular(path) as stream:
        length = os.fstat(stream.fileno()).st_size
        return read_region(Region(stream, 0, length), values=values)


def read_region(region: Region, *, values: bool = True) -> FileContent:
    """Read a part of a file, in the format that its first bytes show."""
    content = FileContent()
    head = region.read(16)
    region.seek(0)
    try:
        if head.startswith(b"PK\x03\x04"):
            content.format = "torch.save file"
            _read_zip(region, content, values=values)
        elif head.startswith(_LEGACY_MAGIC):
            content.format = "torch.save file (before torch 1.6)"
            _read_legacy(region, content, values=values)
        elif head[8:9] == b"{":
            content.format = "safetensors"
            _read_safetensors(region, content, values=values)
        elif head.startswith(b"\x80"):
            content.format = "pickle"
            data = _whole(region, 0, region.length)
            tree = unpickled(data, content)
            _Tree(content, _NoStorages()).visit(tree, values=values)
            content.unknown.append("a pickle has no hash: a changed bit can't be told")
        else:
            content.unknown.append("no format that is known begins like this file")
    except (_Damaged, RefusedPickle, zipfile.BadZipFile, OSError) as error:
        content.problems.append(_line(error))
    except (LookupError, ValueError, TypeError, RuntimeError, EOFError, struct.error) as error:
        content.problems.append(f"{type(error).__name__}: {_line(error)}")
    return content


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _whole(region: Region, begin: int, length: int) -> bytes:
    if length > MOST_PICKLE_BYTES:
        raise _Damaged(f"a pickle of {length:,} bytes is too large to be read")
    return b"".join(region.pieces(begin, length))


def unpickled(data: bytes, content: FileContent) -> Any:
    """Return what a pickle describes, and add the names in it to `content`."""
    if len(data) > MOST_PICKLE_BYTES:
        raise _Damaged("a pickle is too large to be read")
    return _several(data, 1, content)[0][0]


def _several(data: bytes, count: int, content: FileContent) -> tuple[list[Any], PickleReader]:
    """Return so many pickles and their reader; names count where one is refused later, too."""
    reader = PickleReader(data)
    try:
        return reader.all(count), reader
    finally:
        content.names |= reader.named


# Count the values that are not finite.


def count_nonfinite(
    region: Region,
    begin: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Return the numbers of NaN and inf of a tensor whose first element is at `begin`."""
    if stride is None:
        stride = _contiguous(shape)
    numel = math.prod(shape)
    if not numel or not (dtype.is_floating_point or dtype.is_complex):
        return 0, 0

    # A dimension with stride 0 repeats the same elements.
    repeats = math.prod(
        size for size, step in zip(shape, stride, strict=True) if step == 0 and size > 1
    )
    sides = sorted(
        (step, size) for size, step in zip(shape, stride, strict=True) if step > 0 and size > 1
    )
    distinct = math.prod(size for _, size in sides)
    extent = 1 + sum((size - 1) * step for step, size in sides)
    if begin + extent * dtype.itemsize > region.length:
        raise _Damaged("its values lie beyond the end of the file")
    if distinct > extent:
        raise _Damaged("it overlaps with itself")

    nan = 0
    inf = 0
    if distinct == extent:
        for piece in region.pieces(begin, extent * dtype.itemsize):
            more_nan, more_inf = _count(
                torch.frombuffer(bytearray(piece), dtype=torch.uint8), dtype
            )
            nan += more_nan
            inf += more_inf
    elif extent * dtype.itemsize > MOST_STRIDED_BYTES:
        raise _Damaged("it is a strided view that is too large to be read")
    else:
        data = bytearray(_whole(region, begin, extent * dtype.itemsize))
        view = torch.frombuffer(data, dtype=dtype)
        sizes = [size for _, size in sides]
        steps = [step for step, _ in sides]
        nan, inf = _count(view.as_strided(sizes, steps).contiguous().view(-1), dtype)
    return nan * repeats, inf * repeats


def _count(values: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    values = values.view(dtype)
    if dtype.itemsize == 1:
        values = values.float()
    return int(values.isnan().sum()), int(values.isinf().sum())


def _contiguous(shape: Sequence[int]) -> list[int]:
    steps = []
    step = 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return steps[::-1]


def _sizes(given: Any) -> tuple[int, ...]:
    """Return a shape or a stride of plain integers, also from an unbuilt torch.Size."""
    if isinstance(given, StandIn) and given.named == "torch.Size":
        (given,) = given.arguments
    if type(given) not in (tuple, list) or len(given) > 64:
        raise _Damaged("a shape is no short tuple")
    if any(type(size) is not int or not 0 <= size < 2**62 for size in given):
        raise _Damaged(f"a shape is {given!r:.80}")
    return tuple(given)


# Find the tensors in what a pickle of torch describes.

# Beginnings of the functions that a pickled tensor would call.
REBUILD_PREFIXES = ("torch._utils._rebuild_", "torch._tensor._rebuild_")
STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
    "UntypedStorage": torch.uint8,
}


class _NoStorages:
    def place(self, key: Any) -> tuple[Region, int, int]:
        raise _Damaged("its values are not in the file")


class _Tree:
    """Collects tensors and other values from nested containers, by dotted keys."""

    def __init__(self, content: FileContent, storages: Any) -> None:
        self._content = content
        self._storages = storages
        self._num_visited = 0

    def visit(self, node: Any, *, values: bool) -> None:
        self._values = values
        self._visit("", node, 0)

    def _visit(self, name: str, node: Any, depth: int) -> None:
        self._num_visited += 1
        if self._num_visited > MOST_KEYS or depth > DEEPEST_KEY_PATH:
            raise _Damaged("it is nested too deep, or has too many keys, to be listed")
        if isinstance(node, StandIn) and (tensor := self._tensor(name, node)) is not None:
            self._content.tensors.append(tensor)
            return
        children = _children(node)
        if children is None:
            self._content.values[name] = _in_words(node)
            return
        for key, child in children:
            text = str(key) if isinstance(key, str | int | float | bool) else _in_words(key)
            self._visit(f"{name}.{text}" if name else text, child, depth + 1)

    def _tensor(self, name: str, node: StandIn) -> FoundTensor | None:
        if not node.named.startswith(REBUILD_PREFIXES):
            return None
        kind = node.named.rpartition("._rebuild_")[2]
        arguments = node.arguments
        if kind in ("parameter", "parameter_with_state", "buffer"):
            return self._tensor(name, arguments[0])
        if kind == "from_type_v2":
            return self._tensor(name, arguments[0](*arguments[2]))
        if kind in ("tensor_v2", "tensor_v3", "tensor"):
            return self._strided(name, arguments, kind)
        return self._other(name, arguments, kind)

    def _strided(self, name: str, arguments: Any, kind: str) -> FoundTensor:
        storage, offset, shape, stride = arguments[:4]
        if type(storage) is not tuple:
            raise _Damaged(f"{name:.80} has no storage")
        _, storage_class, key = storage[:3]
        dtype = _dtype_of(arguments[6] if kind == "tensor_v3" else storage_class)
        found = FoundTensor(name, _sizes(shape), str(dtype).removeprefix("torch."))
        try:
            region, begin, num_bytes = self._storages.place(key)
            steps = _sizes(stride)
            first = _sizes((offset,))[0] * dtype.itemsize
            sides = zip(found.shape, steps, strict=True)
            last = first + dtype.itemsize * (1 + sum((size - 1) * step for size, step in sides))
            if found.numel and last > num_bytes:
                raise _Damaged(f"its storage has {num_bytes:,} bytes, and it needs {last:,}")
            if self._values:
                found.nan, found.inf = count_nonfinite(
                    region, begin + first, dtype, found.shape, steps
                )
        except (_Damaged, RuntimeError) as error:
            found.problem = _line(error)
            self._content.problems.append(f"{name:.80}: {found.problem}")
        return found

    def _other(self, name: str, arguments: Any, kind: str) -> FoundTensor:
        """Describe a sparse, quantized or wrapped tensor."""
        if kind == "sparse_tensor" and "torch.sparse_coo" in arguments[0].arguments:
            _, values, shape = arguments[1][:3]
            found = self._tensor(name, values) or FoundTensor(name, (), kind)
            return dataclasses.replace(found, shape=_sizes(shape))
        found = FoundTensor(name, (), kind.replace("_", " "))
        found.problem = "its values are not looked at"
        self._content.unknown.append(f"{name:.80} is a {found.dtype}: NaN in it can't be told")
        return found


def _dtype_of(given: Any) -> torch.dtype:
    module, _, name = str(getattr(given, "named", "")).rpartition(".")
    if name in STORAGE_DTYPES:
        return STORAGE_DTYPES[name]
    dtype = getattr(torch, name, None) if module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise _Damaged(f"a tensor has the dtype {given!r:.80}")
    return dtype


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return keys and values of a container, or None for what is listed as one value."""
    if type(node) is dict:
        return list(node.items())
    if type(node) in (list, tuple):
        if all(not isinstance(item, dict | list | tuple | StandIn) for item in node):
            return None
        return list(enumerate(node))
    if isinstance(node, StandIn):
        children = [*node.entries, *enumerate(node.items)]
        if type(node.state) is dict and not node.entries:
            children += node.state.items()
        return children or None
    return None


def _in_words(node: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(node, StandIn):
        return node.named
    if type(node) in (list, tuple, set, frozenset, dict, bytes):
        return f"{type(node).__name__} of {len(node):,}"
    return repr(node)[:80] if type(node) is not int or abs(node) < 2**70 else "an integer"


# The zip format of torch.save: one record for each storage, with its CRC-32.


class _ZipStorages:
    def __init__(self, region: Region, archive: zipfile.ZipFile, root: str) -> None:
        self._region = region
        self._root = root
        self._records = {record.filename: record for record in archive.infolist()}

    def place(self, key: Any) -> tuple[Region, int, int]:
        record = self._records.get(f"{self._root}data/{key}")
        if record is None:
            raise _Damaged(f"its storage {key!r:.40} is not in the file")
        return self._region, _place_of(self._region, record), record.file_size


def _place_of(region: Region, record: zipfile.ZipInfo) -> int:
    """Return where the bytes of a stored record begin."""
    region.seek(record.header_offset)
    header = region.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise _Damaged(f"{record.filename!r:.80} has no header where the index places it")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return record.header_offset + 30 + name_length + extra_length


def _read_zip(region: Region, content: FileContent, *, values: bool) -> None:
    # zipfile reads the index with one call; a region limits what one call returns.
    with zipfile.ZipFile(region) as archive:
        records = archive.infolist()
        _check_records(region, records, content)
        pickles = [one.filename for one in records if one.filename.count("/") <= 1]
        name = next((one for one in pickles if one.endswith("data.pkl")), None)
        if name is None:
            content.format = "zip file"
            content.unknown.append("it has no data.pkl: torch.save did not write it")
            return
        root = name.removesuffix("data.pkl")
        if any(one.filename == f"{root}constants.pkl" for one in records):
            content.format = "TorchScript file"

        record = archive.getinfo(name)
        data = _whole(region, _place_of(region, record), record.file_size)
        tree = unpickled(data, content)
        if f"{root}byteorder" in archive.namelist() and values:
            order = archive.getinfo(f"{root}byteorder")
            if _whole(region, _place_of(region, order), min(order.file_size, 16)) != b"little":
                content.unknown.append("its byte order is not little: NaN can't be told")
                values = False
        if type(tree) is dict and "pytorch-lightning_version" in tree:
            content.format = "Lightning checkpoint"
        _Tree(content, _ZipStorages(region, archive, root)).visit(tree, values=values)


def _check_records(region: Region, records: list[zipfile.ZipInfo], content: FileContent) -> None:
    """Compare the CRC-32 of every record with its bytes."""
    names = {record.filename for record in records}
    if len(names) < len(records):
        raise _Damaged("two of its records have the same name")
    if sum(record.file_size for record in records) > region.length:
        raise _Damaged("its records overlap, or are compressed: torch.save did not write it")
    content.algorithm = "CRC-32"
    differ = []
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise _Damaged(f"{record.filename!r:.80} is compressed: torch.save did not write it")
        checksum = 0
        for piece in region.pieces(_place_of(region, record), record.file_size):
            checksum = zlib.crc32(piece, checksum)
        if checksum == record.CRC:
            content.num_hashed += 1
        else:
            differ.append(record.filename)
    if differ and not content.num_hashed:
        # torch.serialization.set_crc32_options(False) writes another number there.
        content.unknown.append("it was saved without checksums: a changed bit can't be told")
    elif differ:
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        content.problems.append(f"{differ[0]!r:.80}{more}: another CRC-32 than was saved")


# The format of torch.save before torch 1.6: pickles, and then the storages in a row.

_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


class _RowStorages:
    def __init__(self, region: Region, places: dict[str, tuple[int, int]]) -> None:
        self._region = region
        self._places = places

    def place(self, key: Any) -> tuple[Region, int, int]:
        if key not in self._places:
            raise _Damaged(f"its storage {key!r:.40} is not in the file")
        begin, num_bytes = self._places[key]
        return self._region, begin, num_bytes


def _read_legacy(region: Region, content: FileContent, *, values: bool) -> None:
    # The magic number, the version, facts of the machine, the values and the storages' keys.
    data = region.read(min(region.length, MOST_PICKLE_BYTES))
    (*_, tree, keys), reader = _several(data, 5, content)
    dtypes = {}
    for reference in reader.references:
        if type(reference) is tuple and len(reference) >= 5:
            dtypes[reference[2]] = _dtype_of(reference[1])
    position = reader.stream.tell()
    places: dict[str, tuple[int, int]] = {}
    for key in keys if type(keys) is list else []:
        if key not in dtypes:
            raise _Damaged(f"its storage {key!r:.40} has no dtype")
        region.seek(position)
        num_bytes = int.from_bytes(region.read(8), "little") * dtypes[key].itemsize
        if position + 8 + num_bytes > region.length:
            raise _Damaged("it is cut off: a storage lies beyond the end of the file")
        places[key] = position + 8, num_bytes
        position += 8 + num_bytes
    if position != region.length:
        content.problems.append(f"{region.length - position:,} bytes follow its last storage")
    content.unknown.append("this format has no hash: a changed bit can't be told")
    _Tree(content, _RowStorages(region, places)).visit(tree, values=values)


# safetensors: a header of JSON with the place of each tensor.


def _read_safetensors(region: Region, content: FileContent, *, values: bool) -> None:
    length = int.from_bytes(region.read(8), "little")
    if length > min(MOST_INDEX_BYTES, region.length):
        raise _Damaged(f"its header has {length:,} bytes, and the file {region.length:,}")
    header = json.loads(region.read(length))
    metadata = header.pop("__metadata__", None) or {}
    content.values |= {f"__metadata__.{key}": _in_words(value) for key, value in metadata.items()}
    content.unknown.append("safetensors has no hash: a changed bit can't be told")

    start = 8 + length
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape = _sizes(entry["shape"])
        begin, after = entry["data_offsets"]
        found = FoundTensor(name, shape, entry["dtype"])
        content.tensors.append(found)
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if begin != end or after < begin:
            raise _Damaged(f"{name:.80} lies at bytes {begin} to {after}, not behind byte {end}")
        end = after
        if dtype is None:
            found.problem = f"NaN in {entry['dtype']!r:.20} can't be told"
            content.unknown.append(f"{name:.80}: {found.problem}")
            continue
        found.dtype = str(dtype).removeprefix("torch.")
        if after - begin != math.prod(shape) * dtype.itemsize:
            raise _Damaged(f"{name:.80} has {after - begin:,} bytes, which is not its shape")
        if start + after > region.length:
            raise _Damaged(f"it is cut off: {name:.80} ends beyond the end of the file")
        if values:
            found.nan, found.inf = count_nonfinite(region, start + begin, dtype, shape)
    if start + end != region.length:
        content.problems.append(f"{region.length - start - end:,} bytes follow its last tensor")


def read_index(path: Path) -> Any:
    """Read a JSON file of bounded size; raise ValueError."""
    with open_regular(path) as stream:
        data = stream.read(MOST_INDEX_BYTES + 1)
    if len(data) > MOST_INDEX_BYTES:
        raise _Damaged(f"{path.name} is too large to be read")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise _Damaged(f"{path.name} is nested too deep") from error
