"""Read the tensors of files that other programs wrote, without unpickling anything.

`torch.load(weights_only=True)` reads files of `torch.save`, with an inert class in place of each
name that it does not know; safetensors reads its own. Tensors are mapped into memory, and their
values are counted in pieces. What a format can't prove is listed as unknown, and a damaged or
forged file becomes a problem in one line.

Proof: `python -m pytest tests/cli/test_inspection.py`.
"""

import io
import json
import math
import os
import pickle
import stat
import struct
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.unpickle import PickleReader, RefusedPickle

# Elements that are looked at together; a view in another order than its storage is copied whole.
MOST_ELEMENTS_AT_ONCE = 2**26
# An index or a pickle inside of a file is read whole; a larger one is not read at all.
MOST_INDEX_BYTES = 2**25
MOST_PICKLE_BYTES = 2**28
# Smaller pickles can't take much memory or time.
SMALL_PICKLE_BYTES = 2**16
# Keys of nested containers that are visited; shared containers could give endlessly many.
MOST_KEYS = 500_000
DEEPEST_KEY_PATH = 60
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# The magic number, the version, facts of the machine, the values and the storages' keys.
NUM_LEGACY_PICKLES = 5


@dataclass
class FoundTensor:
    """One tensor of a file; `nan` and `inf` are None where its values were not counted."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nan: int | None = None
    inf: int | None = None

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
    # Records whose CRC-32 was compared with their bytes.
    num_hashed: int = 0


class DamagedFile(ValueError):
    """A file that is not what its format requires."""


class Inert:
    """Stands for an object whose class is not imported; it keeps what would be set on it."""

    named = ""

    def __new__(cls, *_: Any, **__: Any) -> "Inert":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Errors of torch, safetensors and zipfile on damaged or forged bytes.
DAMAGE = (
    *(RefusedPickle, SafetensorError, zipfile.BadZipFile, OSError, EOFError, LookupError),
    *(ValueError, TypeError, RuntimeError, AttributeError, AssertionError, MemoryError),
    struct.error,
)


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file; a pipe or a device would block or never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def read_tensor_file(path: Path, *, values: bool = True) -> FileContent:
    """Read one file of tensors; without `values`, NaN and inf are not counted."""
    content = FileContent()
    with open_regular(path) as stream:
        try:
            _read(stream, path, content, values=values)
        except DAMAGE as error:
            content.problems.append(in_a_line(error))
    return content


def read_piece(data: bytes, *, values: bool = True) -> FileContent:
    """Read a part of a file, as torch.save wrote it."""
    content = FileContent()
    try:
        _read_zip(io.BytesIO(data), None, content, values=values)
    except DAMAGE as error:
        content.problems.append(in_a_line(error))
    return content


def _read(stream: BinaryIO, path: Path, content: FileContent, *, values: bool) -> None:
    """Read a file in the format that its first bytes show."""
    head = stream.read(16)
    stream.seek(0)
    if head.startswith(b"PK\x03\x04"):
        _read_zip(stream, path, content, values=values)
    elif head.startswith(LEGACY_MAGIC):
        content.format = "torch.save file (before torch 1.6)"
        content.unknown.append("this format has no hash: a changed bit can't be told")
        pickled = stream.read(MOST_PICKLE_BYTES)
        stream.seek(0)
        tree = _load(stream, pickled, content, num_pickles=NUM_LEGACY_PICKLES)
        _add_tree(tree, content, values=values)
    elif head[8:9] == b"{":
        content.format = "safetensors"
        content.unknown.append("safetensors has no hash: a changed bit can't be told")
        _read_safetensors(path, content, values=values)
    elif head.startswith(b"\x80"):
        content.format = "pickle"
        add_names(stream.read(MOST_PICKLE_BYTES + 1), content)
        content.unknown.append("a pickle has no hash and no tensors: what it holds can't be told")
    else:
        content.unknown.append("no format that is known begins like this file")


def add_names(data: bytes, content: FileContent, *, num_pickles: int = 1) -> Any:
    """Add the names in pickles to `content`; return the first, with stand-ins for its objects."""
    if len(data) > MOST_PICKLE_BYTES:
        raise DamagedFile(f"a pickle of {len(data):,} bytes is too large to be read")
    reader = PickleReader(data)
    try:
        return reader.all(num_pickles)[0]
    finally:
        # Names count where a pickle is refused later, too.
        content.names |= reader.named


def _load(
    source: Any,
    pickled: bytes,
    content: FileContent,
    *,
    num_pickles: int = 1,
    mapped: bool = False,
) -> Any:
    """Load a file of torch.save, with inert objects in place of names that torch does not know.

    A small pickle is tried without them first: most name torch's own functions alone.
    """
    if len(pickled) <= SMALL_PICKLE_BYTES:
        try:
            return _torch_load(source, (), mapped=mapped)
        except pickle.UnpicklingError:
            if hasattr(source, "seek"):
                source.seek(0)
    add_names(pickled, content, num_pickles=num_pickles)
    inert = [(type("Inert", (Inert,), {"named": name}), name) for name in content.names]
    try:
        return _torch_load(source, inert, mapped=mapped)
    except pickle.UnpicklingError as error:
        # torch adds advice to its reason.
        reason = str(error).split("WeightsUnpickler error: ")[-1].split("\n")[0]
        content.unknown.append(f"its tensors can't be told ({reason:.200})")
        return {}


def _torch_load(source: Any, inert: Sequence[Any], *, mapped: bool) -> Any:
    with torch.serialization.safe_globals([*inert]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)


# The zip format of torch.save: one record for each storage, with its CRC-32.


def _read_zip(stream: Any, path: Path | None, content: FileContent, *, values: bool) -> None:
    content.format = "torch.save file"
    with zipfile.ZipFile(stream) as archive:
        _check_records(archive, content)
        names = [name for name in archive.namelist() if name.count("/") <= 1]
        name = next((one for one in names if one.endswith("data.pkl")), None)
        if name is None:
            content.format = "zip file"
            content.unknown.append("it has no data.pkl: torch.save did not write it")
            return
        record = archive.getinfo(name)
        if record.file_size > MOST_PICKLE_BYTES:
            raise DamagedFile("its data.pkl is too large to be read")
        # It was compared above; with it, a record whose number is another one can't be read.
        del record.CRC
        pickled = archive.read(record)
        if name.replace("data.pkl", "constants.pkl") in names:
            content.format = "TorchScript file"
            add_names(pickled, content)
            content.unknown.append("it holds code too: its tensors can't be told")
            return
    stream.seek(0)
    tree = _load(path or stream, pickled, content, mapped=path is not None)
    if type(tree) is dict and "pytorch-lightning_version" in tree:
        content.format = "Lightning checkpoint"
    _add_tree(tree, content, values=values)


def _check_records(archive: zipfile.ZipFile, content: FileContent) -> None:
    """Compare the CRC-32 of every record with its bytes."""
    records = archive.infolist()
    if len({record.filename for record in records}) < len(records):
        raise DamagedFile("two of its records have the same name")
    differ = []
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise DamagedFile(f"{record.filename!r:.80} is compressed: torch.save did not write it")
        try:
            with archive.open(record) as opened:
                while opened.read(2**24):
                    pass
            content.num_hashed += 1
        except zipfile.BadZipFile as error:
            if "CRC" not in str(error):
                raise
            differ.append(record.filename)
    if differ and not content.num_hashed:
        # torch.serialization.set_crc32_options(False) writes another number there.
        content.unknown.append("it was saved without checksums: a changed bit can't be told")
    elif differ:
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        content.problems.append(f"{differ[0]!r:.80}{more}: another CRC-32 than was saved")


def _read_safetensors(path: Path, content: FileContent, *, values: bool) -> None:
    with safe_open(path, framework="pt") as file:
        content.values |= {
            f"__metadata__.{key}": repr(value)[:80]
            for key, value in (file.metadata() or {}).items()
        }
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            content.tensors.append(_found(name, file.get_tensor(name), values=values))


# Tensors and other values in what torch.load returned.


def _add_tree(tree: Any, content: FileContent, *, values: bool) -> None:
    """Collect tensors and other values from nested containers, by dotted keys."""
    for number, (name, node) in enumerate(_leaves(tree, "", 0)):
        if number > MOST_KEYS:
            raise DamagedFile("it has too many keys to be listed")
        if isinstance(node, Tensor):
            content.tensors.append(_found(name, node.detach(), values=values))
        else:
            content.values[name] = _in_words(node)


def _leaves(node: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST_KEY_PATH:
        raise DamagedFile("it is nested too deep to be listed")
    children = _children(node)
    if children is None:
        yield name, node
    for key, child in children or ():
        text = str(key) if isinstance(key, str | int | float | bool) else _in_words(key)
        yield from _leaves(child, f"{name}.{text}" if name else text, depth + 1)


def _children(node: Any) -> Any:
    """Return keys and values of a container, or None for what is listed as one value."""
    if isinstance(node, Inert):
        return _children(getattr(node, "state", None))
    if isinstance(node, dict):
        return node.items()
    holds_more = (dict, list, tuple, Inert, Tensor)
    if type(node) in (list, tuple) and any(isinstance(item, holds_more) for item in node):
        return enumerate(node)
    return None


def _in_words(node: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(node, Inert):
        return node.named
    if type(node) in (list, tuple, set, dict, bytes):
        return f"{type(node).__name__} of {len(node):,}"
    return repr(node)[:80] if type(node) is not int or abs(node) < 2**70 else "an integer"


def _found(name: str, tensor: Tensor, *, values: bool) -> FoundTensor:
    found = FoundTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if values:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout is not torch.strided:
            tensor = tensor.values()
        found.nan, found.inf = _count_nonfinite(tensor)
    return found


def _count_nonfinite(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of NaN and inf."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return 0, 0
    # A dimension with stride 0 repeats the same elements.
    repeats = 1
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0:
            repeats *= tensor.size(dim)
            tensor = tensor.narrow(dim, 0, min(1, tensor.size(dim)))
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise DamagedFile("a tensor overlaps with itself")
    nan = 0
    inf = 0
    for piece in tensor.reshape(-1).split(MOST_ELEMENTS_AT_ONCE):
        plain = piece.float() if piece.element_size() == 1 else piece
        nan += int(plain.isnan().sum())
        inf += int(plain.isinf().sum())
    return nan * repeats, inf * repeats


def read_index(path: Path) -> Any:
    """Read a JSON file of bounded size; raise ValueError."""
    with open_regular(path) as stream:
        data = stream.read(MOST_INDEX_BYTES + 1)
    if len(data) > MOST_INDEX_BYTES:
        raise DamagedFile(f"{path.name} is too large to be read")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise DamagedFile(f"{path.name} is nested too deep") from error
