"""Write Python values as JSON, and read them back as the same values of the same types.

    tensors = CollectedTensors()
    content = encode(part.state_dict(), Place("extra.stats", "part.extra-stats"), tensors)
    part.load_state_dict(decode(content, tensors.by_name))

`VALUE_KINDS` is the one table: for each kind of value its mark in the JSON, how it is written and
how it is read. A value of another type is refused with its path, before anything is written.
Tensors and large arrays stay out of the JSON, under names that no two of them share.

Why so long: only with all kinds of values in one table is it plain what can be saved.

Proof: `python -m pytest tests/runs/test_state_values.py`.
"""

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn

from .ranks import DamagedCheckpoint

# Where a value is, and the tensors that were found in values.

# Containers inside of containers; reading takes a few Python frames for each.
MOST_NESTED = 100
# Larger arrays are saved as tensors.
MOST_ARRAY_BYTES = 4096
# Decimal digits of longer integers are refused by Python's own parser.
MOST_INTEGER_BITS = 2048


@dataclass(frozen=True)
class Place:
    """The path of a value for a person, and the name under which its tensors are saved."""

    shown: str
    name: str

    def inner(self, key: Any, number: int) -> "Place":
        """Return the place of an element, by its key and its number in the container."""
        return Place(f"{self.shown}[{key!r:.60}]", f"{self.name}/{name_component(key, number)}")


def name_component(key: Any, number: int) -> str:
    """Return a text for the key of an element; no other key of its container has the same."""
    if type(key) is int:
        return f"#{key}"
    if type(key) is not str:
        return f"##{number}"
    text: str = key.replace("~", "~0").replace("/", "~1")
    return f"~2{text[1:]}" if text.startswith("#") else text


class CollectedTensors:
    """The tensors of one snapshot, by name; of several with the same memory only the first."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def add(self, tensor: Tensor, place: Place) -> str:
        """Add a tensor, and return the name under which this memory is saved."""
        identity = memory_of(tensor)
        if identity in self._names:
            return self._names[identity]
        if place.name in self.by_name:
            raise ValueError(
                f"{place.shown} would be saved as {place.name}, like another tensor: rename it"
            )
        self._names[identity] = place.name
        self.by_name[place.name] = tensor
        return place.name


def memory_of(tensor: Tensor) -> Any:
    """Return a key that two tensors share exactly if they are the same elements in memory."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    data = local() if local else tensor
    if not data.numel() or data.is_meta:
        return object()
    return (
        data.device,
        data.untyped_storage().data_ptr(),
        data.storage_offset(),
        data.shape,
        data.stride(),
        data.dtype,
        data.is_conj(),
        data.is_neg(),
    )


@dataclass(frozen=True)
class _Writer:
    """Writes the elements of one container."""

    place: Place
    tensors: CollectedTensors | None
    depth: int = 0

    def inner(self, value: Any, key: Any, number: int = 0) -> Any:
        place = self.place.inner(key, number)
        if self.depth >= MOST_NESTED:
            refuse_value(place, f"a value that contains itself, or {MOST_NESTED} others around it,")
        return _encode(value, _Writer(place, self.tensors, self.depth + 1))

    def each(self, values: Any) -> list[Any]:
        # The state of Python's generator is a row of 625 integers, and each save has it twice.
        if self.depth < MOST_NESTED and all(map(_is_short_int, values)):
            return list(values)
        return [self.inner(value, number, number) for number, value in enumerate(values)]

    def entries(self, value: Mapping[Any, Any]) -> list[list[Any]]:
        without_tensors = _Writer(Place(f"a key of {self.place.shown}", ""), None, self.depth)
        return [
            [_encode(key, without_tensors), self.inner(item, key, number)]
            for number, (key, item) in enumerate(value.items())
        ]


@dataclass(frozen=True)
class _Reader:
    tensors: Mapping[str, Tensor]

    def inner(self, content: Any) -> Any:
        return _decode(content, self)

    def each(self, content: Any) -> list[Any]:
        if type(content) is not list:
            raise TypeError("its elements are no list")
        return [_decode(item, self) for item in content]

    def entries(self, content: Any) -> list[tuple[Any, Any]]:
        return [(_decode(key, self), _decode(item, self)) for key, item in content]


CONVERT_ADVICE = "convert it to numbers, text, lists, mappings, arrays of numbers or tensors"
BASE_ADVICE = "if it is of a quantised base below adapters, pass trained_only=True"


def refuse_value(place: Place, what: str, *, advice: str = CONVERT_ADVICE) -> NoReturn:
    """Raise the error about a value that can't be restored."""
    raise ValueError(f"{place.shown}: {what} can't be saved; {advice}")


def plain_text(value: Any, *, depth: int = 0) -> Any:
    """Return a configuration with plain text in place of members of text enumerations."""
    if isinstance(value, str):
        return str.__str__(value)
    if depth > MOST_NESTED or type(value) not in (list, dict):
        return value
    if type(value) is list:
        return [plain_text(item, depth=depth + 1) for item in value]
    return {plain_text(key): plain_text(item, depth=depth + 1) for key, item in value.items()}


# Containers and single values.


def _write_float(value: float, writer: _Writer) -> Any:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _is_short_int(value: Any) -> bool:
    return type(value) is int and value.bit_length() <= MOST_INTEGER_BITS


def _write_int(value: int, writer: _Writer) -> Any:
    return value if value.bit_length() <= MOST_INTEGER_BITS else {"$int": hex(value)}


def _write_dict(value: dict[Any, Any], writer: _Writer) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {
            key: writer.inner(item, key, number) for number, (key, item) in enumerate(value.items())
        }
    return {"$items": writer.entries(value)}


def _write_set(value: Any, writer: _Writer) -> Any:
    without_tensors = _Writer(writer.place, None, writer.depth)
    # The order of a set may differ from process to process.
    return sorted(without_tensors.each(value), key=json.dumps)


def _write_ordered(value: "OrderedDict[Any, Any]", writer: _Writer) -> Any:
    # Versions of modules that `nn.Module.state_dict` leaves in an attribute.
    versions = getattr(value, "_metadata", None)
    return {
        "items": writer.entries(value),
        "versions": None if versions is None else writer.inner(versions, "_metadata"),
    }


def _read_ordered(content: Any, reader: _Reader) -> "OrderedDict[Any, Any]":
    value = OrderedDict(reader.entries(content["items"]))
    if content["versions"] is not None:
        value._metadata = reader.inner(content["versions"])  # type: ignore[attr-defined]
    return value


DEFAULT_FACTORIES: dict[str, Any] = {
    factory.__name__: factory
    for factory in (bool, bytes, complex, dict, float, int, list, set, str, tuple, deque)
}
DEFAULT_FACTORIES |= {"OrderedDict": OrderedDict, "Counter": Counter, "None": None}


def _write_default(value: "defaultdict[Any, Any]", writer: _Writer) -> Any:
    for name, factory in DEFAULT_FACTORIES.items():
        if value.default_factory is factory:
            return [name, writer.entries(value)]
    refuse_value(writer.place, f"a defaultdict of {value.default_factory!r:.60}")


def _read_default(content: Any, reader: _Reader) -> "defaultdict[Any, Any]":
    name, entries = content
    return defaultdict(DEFAULT_FACTORIES[name], reader.entries(entries))


def _write_dtype(value: torch.dtype, writer: _Writer) -> str:
    return str(value).removeprefix("torch.")


def _read_dtype(content: Any, reader: _Reader) -> torch.dtype:
    dtype = getattr(torch, content, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{content!r:.40} is no dtype")
    return dtype


def _read_bounded(content: Any, reader: _Reader) -> "deque[Any]":
    most, items = content
    return deque(reader.each(items), most)


def _write_deque(value: "deque[Any]", writer: _Writer) -> Any:
    return [value.maxlen, writer.each(value)]


# Arrays and scalars of numpy.


def _write_array(array: Any, writer: _Writer) -> Any:
    dtype = array.dtype
    shape = None if isinstance(array, numpy.generic) else list(array.shape)
    if dtype == numpy.dtype(object) and shape is not None:
        return {"shape": shape, "objects": writer.each(array.ravel().tolist())}

    description = _description(dtype)
    if description is None:
        refuse_value(writer.place, f"a numpy array of dtype {dtype!s:.60}")
    is_transposed = array.flags.f_contiguous and not array.flags.c_contiguous
    order: Any = "F" if is_transposed else "C"
    raw = array.tobytes(order)
    data: Any = base64.b64encode(raw).decode()
    if len(raw) > MOST_ARRAY_BYTES and writer.tensors is not None:
        stored = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        data = {"$tensor": writer.tensors.add(stored, writer.place)}
    dtype_content = _encode(description, writer)
    return {"shape": shape, "dtype": dtype_content, "order": order, "data": data}


def _description(dtype: Any) -> Any:
    """Return plain values from which numpy makes the same dtype, or None."""
    if dtype.hasobject or dtype.metadata:
        return None
    description = numpy.lib.format.dtype_to_descr(dtype)
    try:
        made = numpy.lib.format.descr_to_dtype(description)
    except (TypeError, ValueError):
        return None
    return description if made == dtype else None


def _read_array(content: Any, reader: _Reader) -> Any:
    shape = content["shape"]
    if "objects" in content:
        items = reader.each(content["objects"])
        objects = numpy.empty(len(items), dtype=object)
        for number, item in enumerate(items):
            objects[number] = item
        return objects.reshape(shape)

    dtype = numpy.lib.format.descr_to_dtype(reader.inner(content["dtype"]))
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype} is not allowed")
    data = content["data"]
    if isinstance(data, str):
        raw = bytearray(base64.b64decode(data, validate=True))
    else:
        raw = bytearray(reader.inner(data).contiguous().numpy())
    count = math.prod(shape or ())
    if count * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes are no array of {shape} {dtype}")
    array = numpy.ndarray(count, dtype, buffer=raw)
    return array[0] if shape is None else array.reshape(shape, order=content["order"])


# Tensors: those in a plain layout go into the snapshot, others are saved by what they consist of.

_PLAIN_CLASSES = (Tensor, nn.Parameter)
PLAIN_DTYPES = frozenset(
    {
        torch.bool,
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        torch.float8_e8m0fnu,
    }
)
_COMPRESSED_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_QUANTIZED_DTYPES = (torch.qint8, torch.quint8, torch.qint32)
_PER_TENSOR_SCHEMES = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_PER_CHANNEL_SCHEMES = (torch.per_channel_affine, torch.per_channel_symmetric)


def is_plain(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are saved as they are."""
    is_sharded = hasattr(tensor, "to_local")
    return (
        (type(tensor) in _PLAIN_CLASSES or is_sharded)
        and tensor.layout is torch.strided
        and tensor.dtype in PLAIN_DTYPES
        and not tensor.is_nested
        and not tensor.is_meta
    )


def elements_of(tensor: Tensor) -> Tensor:
    """Return a tensor of a class that only adds methods as a plain one, with the same memory."""
    if type(tensor) is Tensor or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor.as_subclass(Tensor)


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements are one in memory, so that they can't be written to."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def _write_tensor(tensor: Tensor, writer: _Writer) -> Any:
    """Return the whole JSON of a tensor, whose mark depends on its layout."""
    if writer.tensors is None:
        refuse_value(writer.place, "a tensor in this place")
    is_parameter = isinstance(tensor, nn.Parameter)
    if type(tensor) not in _PLAIN_CLASSES and not hasattr(tensor, "to_local"):
        advice = BASE_ADVICE if writer.place.shown.startswith("model.") else CONVERT_ADVICE
        what = f"a {type(tensor).__name__}, a tensor of its own class,"
        refuse_value(writer.place, what, advice=advice)
    if tensor.is_nested or tensor.is_meta:
        what = "a nested tensor" if tensor.is_nested else "a tensor without values (device meta)"
        refuse_value(writer.place, what)

    notes: dict[str, Any] = {}
    if is_parameter or (tensor.requires_grad and tensor.is_leaf):
        notes["parameter"] = is_parameter
        notes["requires_grad"] = tensor.requires_grad
    if tensor.device.type != "cpu":
        notes["device"] = tensor.device.type
    content = _content_of(tensor.detach(), writer)
    return {"$noted": [content, notes]} if notes else content


def _content_of(tensor: Tensor, writer: _Writer) -> dict[str, Any]:
    assert writer.tensors is not None
    if is_plain(tensor):
        resolved = tensor.resolve_conj().resolve_neg()
        return {"$tensor": writer.tensors.add(resolved, writer.place)}
    if tensor.layout is torch.sparse_coo:
        return {"$sparse": _sparse(tensor, writer, "_indices", "_values")}
    if tensor.layout in _COMPRESSED_INDICES:
        return {"$compressed": _sparse(tensor, writer, *_COMPRESSED_INDICES[tensor.layout])}
    if tensor.dtype in _QUANTIZED_DTYPES:
        return {"$quantized": _quantized(tensor, writer)}
    if tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel():
        stored = tensor.contiguous().view(torch.uint8)
        name = writer.tensors.add(stored, writer.place)
        return {"$view": [_write_dtype(tensor.dtype, writer), {"$tensor": name}]}
    refuse_value(writer.place, f"a tensor of {tensor.dtype}, {tensor.layout}")


def _sparse(tensor: Tensor, writer: _Writer, *methods: str) -> dict[str, Any]:
    names = methods if tensor.layout is torch.sparse_coo else (*methods, "values")
    content = {name: writer.inner(getattr(tensor, name)(), name) for name in names}
    content["shape"] = list(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        content["coalesced"] = tensor.is_coalesced()
    else:
        content["layout"] = str(tensor.layout).removeprefix("torch.")
    return content


def _read_sparse(content: Any, reader: _Reader) -> Tensor:
    return torch.sparse_coo_tensor(
        reader.inner(content["_indices"]),
        reader.inner(content["_values"]),
        content["shape"],
        is_coalesced=content["coalesced"],
        check_invariants=True,
    )


def _read_compressed(content: Any, reader: _Reader) -> Tensor:
    layouts = {str(layout).removeprefix("torch."): layout for layout in _COMPRESSED_INDICES}
    layout = layouts[content["layout"]]
    outer, inner = _COMPRESSED_INDICES[layout]
    return torch.sparse_compressed_tensor(
        reader.inner(content[outer]),
        reader.inner(content[inner]),
        reader.inner(content["values"]),
        content["shape"],
        layout=layout,
        check_invariants=True,
    )


def _quantized(tensor: Tensor, writer: _Writer) -> dict[str, Any]:
    elements = writer.inner(tensor.int_repr(), "elements")
    if tensor.qscheme() in _PER_TENSOR_SCHEMES:
        zero_point = tensor.q_zero_point()
        return {"elements": elements, "scale": tensor.q_scale(), "zero_point": zero_point}
    if tensor.qscheme() not in _PER_CHANNEL_SCHEMES:
        refuse_value(writer.place, f"a quantized tensor of the scheme {tensor.qscheme()}")
    return {
        "elements": elements,
        "scales": writer.inner(tensor.q_per_channel_scales(), "scales"),
        "zero_points": writer.inner(tensor.q_per_channel_zero_points(), "zero_points"),
        "axis": tensor.q_per_channel_axis(),
    }


def _read_quantized(content: Any, reader: _Reader) -> Tensor:
    elements = reader.inner(content["elements"])
    if "axis" not in content:
        return torch._make_per_tensor_quantized_tensor(
            elements, content["scale"], content["zero_point"]
        )
    scales = reader.inner(content["scales"])
    zero_points = reader.inner(content["zero_points"])
    return torch._make_per_channel_quantized_tensor(elements, scales, zero_points, content["axis"])


def _read_view(content: Any, reader: _Reader) -> Tensor:
    dtype, stored = content
    tensor: Tensor = reader.inner(stored)
    return tensor.view(_read_dtype(dtype, reader))


def _read_noted(content: Any, reader: _Reader) -> Tensor:
    stored, notes = content
    tensor: Tensor = reader.inner(stored)
    if notes.get("parameter"):
        return nn.Parameter(tensor, notes["requires_grad"])
    return tensor.requires_grad_() if notes.get("requires_grad") else tensor


# The table of all kinds of values, and the functions that use it.


@dataclass(frozen=True)
class ValueKind:
    """Functions that write values of some types under a mark, and read them."""

    mark: str
    # Exactly these types, no subclasses; none where another entry writes the mark.
    types: tuple[type, ...]
    write: Callable[[Any, _Writer], Any] | None
    read: Callable[[Any, _Reader], Any]


VALUE_KINDS = (
    ValueKind("$float", (), None, lambda content, reader: float(content)),
    ValueKind("$int", (), None, lambda content, reader: int(content, 16)),
    ValueKind(
        "$complex",
        (complex,),
        lambda value, writer: writer.each([value.real, value.imag]),
        lambda content, reader: complex(*reader.each(content)),
    ),
    ValueKind(
        "$bytes",
        (bytes,),
        lambda value, writer: base64.b64encode(value).decode(),
        lambda content, reader: base64.b64decode(content, validate=True),
    ),
    ValueKind(
        "$bytearray",
        (bytearray,),
        lambda value, writer: base64.b64encode(value).decode(),
        lambda content, reader: bytearray(base64.b64decode(content, validate=True)),
    ),
    ValueKind(
        "$tuple",
        (tuple,),
        lambda value, writer: writer.each(value),
        lambda content, reader: tuple(reader.each(content)),
    ),
    ValueKind(
        "$size",
        (torch.Size,),
        lambda value, writer: list(value),
        lambda content, reader: torch.Size(content),
    ),
    ValueKind(
        "$range",
        (range,),
        lambda value, writer: [value.start, value.stop, value.step],
        lambda content, reader: range(*content),
    ),
    ValueKind("$set", (set,), _write_set, lambda content, reader: set(reader.each(content))),
    ValueKind(
        "$frozenset",
        (frozenset,),
        _write_set,
        lambda content, reader: frozenset(reader.each(content)),
    ),
    ValueKind("$bounded", (deque,), _write_deque, _read_bounded),
    ValueKind("$items", (), None, lambda content, reader: dict(reader.entries(content))),
    ValueKind("$ordered", (OrderedDict,), _write_ordered, _read_ordered),
    ValueKind("$default", (defaultdict,), _write_default, _read_default),
    ValueKind(
        "$counter",
        (Counter,),
        lambda value, writer: writer.entries(value),
        lambda content, reader: Counter(dict(reader.entries(content))),
    ),
    ValueKind("$dtype", (torch.dtype,), _write_dtype, _read_dtype),
    ValueKind(
        "$device",
        (torch.device,),
        lambda value, writer: str(value),
        lambda content, reader: torch.device(content),
    ),
    ValueKind("$numpy", (numpy.ndarray,), _write_array, _read_array),
    ValueKind("$tensor", (), None, lambda content, reader: reader.tensors[content]),
    ValueKind("$sparse", (), None, _read_sparse),
    ValueKind("$compressed", (), None, _read_compressed),
    ValueKind("$quantized", (), None, _read_quantized),
    ValueKind("$view", (), None, _read_view),
    ValueKind("$noted", (), None, _read_noted),
)
_BY_MARK = {kind.mark: kind for kind in VALUE_KINDS}
_BY_TYPE = {type_: kind for kind in VALUE_KINDS for type_ in kind.types}
# Their JSON is the whole of it: no mark, or one that depends on the value.
_WRITERS_WITHOUT_MARK: dict[type, Callable[[Any, _Writer], Any]] = {
    int: _write_int,
    float: _write_float,
    list: lambda value, writer: writer.each(value),
    dict: _write_dict,
}
_JSON_TYPES = frozenset({type(None), bool, str})


def encode(value: Any, place: Place, tensors: CollectedTensors | None = None) -> Any:
    """Return the JSON of a value; its tensors go into `tensors`.

    Raises ValueError, with the path, for a value that `decode` could not restore.
    """
    return _encode(value, _Writer(place, tensors))


def _encode(value: Any, writer: _Writer) -> Any:
    kind = type(value)
    if kind in _JSON_TYPES:
        return value
    if kind in _WRITERS_WITHOUT_MARK:
        return _WRITERS_WITHOUT_MARK[kind](value, writer)
    if isinstance(value, Tensor):
        return _write_tensor(value, writer)
    entry = _BY_TYPE.get(kind)
    if entry is None and isinstance(value, numpy.generic):
        entry = _BY_MARK["$numpy"]
    if entry is None or entry.write is None:
        refuse_value(writer.place, f"a {kind.__name__}")
    return {entry.mark: entry.write(value, writer)}


def decode(content: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return the value that was passed to `encode`; raise DamagedCheckpoint where it can't be."""
    try:
        return _decode(content, _Reader(tensors or {}))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise DamagedCheckpoint(
            f"saved value {content!r:.80} can't be read ({type(error).__name__}: {error})"
        ) from error


def _decode(content: Any, reader: _Reader) -> Any:
    if type(content) is list:
        return [_decode(item, reader) for item in content]
    if type(content) is not dict:
        return content
    if len(content) == 1:
        mark = next(iter(content))
        if mark.startswith("$"):
            return _BY_MARK[mark].read(content[mark], reader)
    return {key: _decode(item, reader) for key, item in content.items()}


@dataclass(frozen=True)
class Reference:
    """A tensor that the JSON of a value names, and what was noted on it."""

    name: str
    notes: Mapping[str, Any] = field(default_factory=dict)


def references(content: Any) -> Iterator[Reference]:
    """Return the tensors that the JSON of a value names."""
    waiting: list[tuple[Any, Mapping[str, Any]]] = [(content, {})]
    while waiting:
        item, notes = waiting.pop()
        if type(item) is list:
            waiting += [(element, {}) for element in item]
        elif type(item) is dict:
            if len(item) == 1 and type(item.get("$tensor")) is str:
                yield Reference(item["$tensor"], notes)
            elif len(item) == 1 and type(noted := item.get("$noted")) is list and len(noted) == 2:
                waiting.append((noted[0], noted[1] if type(noted[1]) is dict else {}))
            else:
                waiting += [(element, notes) for element in item.values()]
