"""Read the tensors of files that other programs wrote, without unpickling anything.

`torch.load(weights_only=True)` reads files of `torch.save`, with an inert class in place of each
name that it does not know; safetensors reads its own. Tensors are mapped into memory, and their
values are counted in pieces. What a format can't prove is listed as unknown, and a damaged or
forged file becomes a problem in one line.

Proof: `python -m pytest tests/cli/test_inspection.py`.
"""

import contextlib
import functools
import math
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.measure import dense_parts
from ..core.unpickle import DAMAGE as PICKLE_DAMAGE
from ..core.unpickle import PickleReader, StandIn
from ..runs.files import read
from ..runs.values import each_once, floats_of

# Elements that are looked at together; a view in another order than its storage is copied whole.
MOST_ELEMENTS_AT_ONCE = 2**26
# An index or a pickle is read whole; a larger one is not read at all.
MOST_PICKLE_BYTES = 2**28
# Smaller pickles can't take much memory or time.
SMALL_PICKLE_BYTES = 2**16
# Keys of nested containers that are visited; shared containers could give endlessly many.
MOST_KEYS = 200_000
DEEPEST_KEY_PATH = 60
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# The magic number, the version, facts of the machine, the values and the storages' keys.
NUM_LEGACY_PICKLES = 5


@dataclass
class FoundTensor:
    """One tensor of a file, with its numbers of NaN and inf."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int


@dataclass
class Inspection:
    """Findings about a file, a part of one, or a folder."""

    format: str = "unknown"
    tensors: list[FoundTensor] = field(default_factory=list)
    # Other values by key, each in a few words.
    values: dict[str, str] = field(default_factory=dict)
    # Damage, and what else speaks against loading it.
    problems: list[str] = field(default_factory=list)
    # Questions that can't be answered, with the reason.
    unknown: list[str] = field(default_factory=list)
    # Classes and functions that loading it would import.
    names: set[str] = field(default_factory=set)
    # Of these: names that a checkpoint of plain tensors does not need.
    imports: list[str] = field(default_factory=list)
    # Of these: names that run commands or code, or open files.
    dangerous: list[str] = field(default_factory=list)
    # Whether every part is there; None if the format does not list its parts.
    complete: bool | None = None
    # Records or files whose hash was compared, by algorithm.
    hashed: dict[str, int] = field(default_factory=dict)
    path: str = ""
    num_bytes: int = 0

    @property
    def whole(self) -> bool | None:
        """True if all of it is there, False if something is missing or damaged, None: unknown."""
        return False if self.problems else self.complete

    @property
    def num_values(self) -> int:
        return sum(math.prod(one.shape) for one in self.tensors)

    @property
    def num_nan(self) -> int:
        return sum(one.nan for one in self.tensors)

    @property
    def num_inf(self) -> int:
        return sum(one.inf for one in self.tensors)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"names": sorted(self.names)}
        return found | {"whole": self.whole, "nan": self.num_nan, "inf": self.num_inf}

    def add(self, other: "Inspection", prefix: str) -> None:
        """Add the findings about a part, its keys behind `prefix`."""
        for tensor in other.tensors:
            tensor.name = prefix + tensor.name
            self.tensors.append(tensor)
        self.values |= {prefix + key: text for key, text in other.values.items()}
        self.problems += [prefix + one for one in other.problems]
        self.unknown += [prefix + one for one in other.unknown]
        self.names |= other.names
        for algorithm, number in other.hashed.items():
            self.hashed[algorithm] = self.hashed.get(algorithm, 0) + number


# Errors of torch, safetensors and zipfile on damaged or forged bytes.
DAMAGE = (
    *PICKLE_DAMAGE,
    *(SafetensorError, zipfile.BadZipFile, struct.error),
    *(OSError, RuntimeError, AssertionError, MemoryError),
)


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file; a pipe or a device would block or never end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file")
    return path.open("rb")


# Reads an index or a pickle; one that is too large is DamagedCheckpoint.
read_whole = functools.partial(read, most_bytes=MOST_PICKLE_BYTES)


def read_tensor_file(path: Path) -> Inspection:
    """Read one file of tensors."""
    with open_regular(path) as stream:
        return read_tensors(stream, path)


def read_tensors(stream: BinaryIO, path: Path | None = None) -> Inspection:
    """Read a file, or a part of one, in the format that its first bytes show."""
    found = Inspection()
    note = found.unknown.append
    head = stream.read(16)
    stream.seek(0)
    try:
        if head.startswith(b"PK\x03\x04"):
            _read_zip(stream, path, found)
        elif head.startswith(LEGACY_MAGIC):
            found.format = "torch.save file (before torch 1.6)"
            note("this format has no hash: a changed bit can't be told")
            pickled = stream.read(MOST_PICKLE_BYTES)
            _add_tree(_load(stream, pickled, found, NUM_LEGACY_PICKLES), found)
        elif head[8:9] == b"{" and path is not None:
            found.format = "safetensors"
            note("safetensors has no hash: a changed bit can't be told")
            _read_safetensors(path, found)
        elif head.startswith(b"\x80") and path is not None:
            found.format = "pickle"
            note("a pickle has no hash and no tensors: what it holds can't be told")
            add_names(PickleReader(read_whole(path)), found)
        else:
            note("no format that is known begins like this file")
    except DAMAGE as error:
        found.problems.append(in_a_line(error))
    # The other formats list their parts, in an index at one end of the file.
    found.complete = None if found.format in ("pickle", "unknown") else True
    return found


def add_names(reader: PickleReader, found: Inspection, num_pickles: int = 1) -> list[Any]:
    """Return what pickles hold, and add the classes and functions that they name."""
    try:
        return reader.all(num_pickles)
    finally:
        # Names count where a pickle is refused later, too.
        found.names |= reader.named


def _load(source: Any, pickled: bytes, found: Inspection, num_pickles: int = 1) -> Any:
    """Load a file of torch.save, with inert objects in place of names that torch does not know.

    A small pickle is tried without them first: most name torch's own functions alone.
    """
    if len(pickled) <= SMALL_PICKLE_BYTES:
        with contextlib.suppress(pickle.UnpicklingError):
            return _load_by_torch(source, [])
    add_names(PickleReader(pickled), found, num_pickles)
    try:
        return _load_by_torch(source, [(type(name, (StandIn,), {}), name) for name in found.names])
    except (pickle.UnpicklingError, TypeError) as error:
        # A stand-in can't take the place of a subclass of Tensor, such as torchao's.
        # torch adds advice to its reason.
        reason = str(error).split("WeightsUnpickler error: ")[-1].split("\n")[0]
        found.unknown.append(f"its tensors can't be told ({reason:.200})")
        return {}


def _load_by_torch(source: Any, allowed: list[Any]) -> Any:
    mapped = isinstance(source, Path)
    if not mapped:
        source.seek(0)
    with torch.serialization.safe_globals(allowed), warnings.catch_warnings(action="ignore"):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)


# The zip format of torch.save: one record for each storage, with its CRC-32.


def _read_zip(stream: Any, path: Path | None, found: Inspection) -> None:
    found.format = "torch.save file"
    with zipfile.ZipFile(stream) as archive:
        _check_records(archive, found)
        names = [name for name in archive.namelist() if re.fullmatch(r"([^/]*/)?data\.pkl", name)]
        if not names:
            raise ValueError("it has no data.pkl: torch.save did not write it")
        record = archive.getinfo(names[0])
        if record.file_size > MOST_PICKLE_BYTES:
            raise ValueError("its data.pkl is too large to be read")
        # It was compared above; with it, a record whose number is another one can't be read.
        del record.CRC
        pickled = archive.read(record)
    _add_tree(_load(path or stream, pickled, found), found)


def _check_records(archive: zipfile.ZipFile, found: Inspection) -> None:
    """Compare the CRC-32 of each record with its bytes, up to the first that differs."""
    records = archive.infolist()
    if len({record.filename for record in records}) < len(records):
        raise ValueError("two of its records have the same name")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{record.filename!r:.80} is compressed: torch.save did not write it")
    if not any(record.CRC for record in records):
        # torch.serialization.set_crc32_options(False) writes no number there.
        found.unknown.append("it was saved without checksums: a changed bit can't be told")
        return
    damaged = archive.testzip()
    found.hashed["CRC-32"] = len(records)
    if damaged is not None:
        found.hashed["CRC-32"] = archive.namelist().index(damaged)
        found.problems.append(f"{damaged!r:.80} is damaged: another CRC-32 than was saved")


def _read_safetensors(path: Path, found: Inspection) -> None:
    with safe_open(path, framework="pt") as file:
        for key, value in (file.metadata() or {}).items():
            found.values[f"__metadata__.{key}"] = repr(value)[:80]
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            found.tensors.append(_describe_tensor(name, file.get_tensor(name)))


# Tensors and other values in what torch.load returned.


def _add_tree(tree: Any, found: Inspection) -> None:
    """Collect tensors and other values from nested containers, by dotted keys."""
    for number, (name, node) in enumerate(_find_leaves(tree, "", 0)):
        if number > MOST_KEYS:
            raise ValueError("it has too many keys to be listed")
        if isinstance(node, Tensor):
            try:
                found.tensors.append(_describe_tensor(name, node.detach()))
            except RuntimeError as error:
                # torch counts nothing in a meta or nested tensor, nor in numbers of four bits.
                found.unknown.append(f"{name}: its values can't be told ({in_a_line(error)})")
        else:
            found.values[name] = _describe_value(node)


def _find_leaves(node: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST_KEY_PATH:
        raise ValueError("it is nested too deep to be listed")
    shown = node
    if isinstance(node, StandIn):
        node = node.state
    holds_more = (dict, list, tuple, StandIn, Tensor)
    if isinstance(node, dict):
        children = list(node.items())
    elif type(node) in (list, tuple) and any(isinstance(item, holds_more) for item in node):
        children = list(enumerate(node))
    else:
        yield name, shown
        return
    for key, child in children:
        text = str(key) if isinstance(key, str | int | float | bool) else _describe_value(key)
        yield from _find_leaves(child, f"{name}.{text}" if name else text, depth + 1)


def _describe_value(node: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(node, StandIn):
        return type(node).__name__
    if type(node) in (list, tuple, set, dict, bytes):
        return f"{type(node).__name__} of {len(node):,}"
    return repr(node)[:80] if type(node) is not int or abs(node) < 2**70 else "an integer"


def _describe_tensor(name: str, tensor: Tensor) -> FoundTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = dense_parts(tensor)[-1]
    return FoundTensor(name, tuple(tensor.shape), dtype, *_count_nonfinite(values))


def _count_nonfinite(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of NaN and inf."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return 0, 0
    size = tensor.numel()
    tensor = each_once(tensor)
    # A view with more elements than its storage is copied whole, to any size if it is forged.
    if tensor.numel() > max(MOST_ELEMENTS_AT_ONCE, tensor.untyped_storage().nbytes()):
        raise RuntimeError("it overlaps with itself")
    repeats = size // max(1, tensor.numel())
    num_nan = 0
    num_inf = 0
    for piece in tensor.reshape(-1).split(MOST_ELEMENTS_AT_ONCE):
        plain = floats_of(piece)
        num_nan += repeats * int(plain.isnan().sum())
        num_inf += repeats * int(plain.isinf().sum())
    return num_nan, num_inf
