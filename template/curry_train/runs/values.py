"""Save Python values beside the tensors of a checkpoint, and read them without running code.

    tensors = CollectedTensors()
    content = encode({"part.stats": part.state_dict()}, tensors)
    data = dump(content)
    part.load_state_dict(decode(load(data), tensors.by_name)["part.stats"])

`torch.save` writes them, and `torch.load(weights_only=True)` reads them with a list of allowed
classes. A value that could not come back is refused with its path, before anything is written.
Tensors stay out of the file, under names that no two of them share.

Proof: `python -m pytest tests/runs/test_state_values.py`.
"""

import copy
import functools
import io
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..core.measure import dense_parts
from ..core.unpickle import PickleReader
from .ranks import reading

# Mappings from names to any values: one to read from, and one to write to.
Values = Mapping[str, Any]
Facts = dict[str, Any]

# Where a value is, and the tensors that were found in values.

# Longer integers are refused by torch.load.
MOST_INTEGER_BITS = 2000


def name_component(key: Any) -> str:
    """Return a text for the key of an element; no other key of its container has the same."""
    is_text = type(key) is str
    # Without # and /.
    text = quote(key if is_text else repr(key), safe=" ", errors="surrogatepass")
    return text if is_text else f"#{text}"


class CollectedTensors:
    """The tensors of one snapshot, by name; of several with the same memory only the first."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        # What tensors hold that are saved among the values.
        self.inline: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def add(self, tensor: Tensor, name: str) -> str:
        """Add a tensor, and return the name under which this memory is saved."""
        identity = memory_of(tensor)
        if identity in self._names:
            return self._names[identity]
        if name in self.by_name:
            raise ValueError(f"two tensors would be saved as {name}: rename one of them")
        self._names[identity] = name
        self.by_name[name] = tensor
        return name


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that may be sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def floats_of(tensor: Tensor) -> Tensor:
    """Return this rank's floating-point elements; none of other tensors."""
    values = local_part(tensor.detach())
    if not (values.is_floating_point() or values.is_complex()):
        return values.new_empty(0, dtype=torch.float32)
    # Torch has no sums of the floats of 8 bits.
    return values.float() if values.dtype.itemsize == 1 else values


def memory_of(tensor: Tensor) -> Any:
    """Return a key that two tensors share exactly if they are the same elements in memory."""
    data = local_part(tensor)
    if not data.numel() or data.is_meta:
        return object()
    return (
        data.device,
        data.data_ptr(),
        data.shape,
        data.stride(),
        data.dtype,
        data.is_conj(),
        data.is_neg(),
    )


CONVERT_ADVICE = "convert it to numbers, text, lists, mappings, arrays of numbers or tensors"
BASE_ADVICE = (
    "if it is of a quantised base below adapters, pass the parameters that train as the model: "
    "torch.nn.ParameterList(one for one in model.parameters() if one.requires_grad)"
)


def refuse_value(name: str, what: str, *, advice: str = CONVERT_ADVICE) -> NoReturn:
    """Raise the error about a value that can't be restored."""
    raise ValueError(f"{name}: {what} can't be saved; {advice}")


# What stands in the file of the values for a tensor.


@dataclass(frozen=True)
class Stored:
    """A tensor that is saved among those of the checkpoint, under this name."""

    name: str
    # The kind of its device, if that is not the host.
    device: str | None = None
    is_parameter: bool = False
    requires_grad: bool = False


# Tensors: those in a plain layout go into the snapshot, others into the file of the values.

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


def each_once(tensor: Tensor) -> Tensor:
    """Return a view with each element in memory once: the first along dimensions of stride 0."""
    strides = tensor.stride()
    firsts = tuple(slice(None if stride else 1) for stride in strides)
    return tensor[firsts] if 0 in strides else tensor


def _encode_leaf(tensor: Any, name: str, tensors: CollectedTensors) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor if _is_simple(tensor) else _restore_value(tensor, name)
    if type(tensor) not in _PLAIN_CLASSES and not hasattr(tensor, "to_local"):
        advice = BASE_ADVICE if name.startswith("model.") else CONVERT_ADVICE
        refuse_value(name, f"a {type(tensor).__name__}, a tensor of its own class,", advice=advice)
    if tensor.is_nested or tensor.is_meta:
        what = "a nested tensor" if tensor.is_nested else "a tensor without values (device meta)"
        refuse_value(name, what)
    if not is_plain(tensor):
        if tensor.layout is not torch.strided:
            tensors.inline[name] = dense_parts(tensor)[-1]
        return _restore_value(tensor.detach(), name)
    stored = tensors.add(tensor.detach().resolve_conj().resolve_neg(), name)
    device = None if tensor.device.type == "cpu" else tensor.device.type
    is_leaf = tensor.requires_grad and tensor.is_leaf
    return Stored(stored, device, isinstance(tensor, nn.Parameter), is_leaf)


# Values of other types.

_CONTAINERS = (list, tuple, dict, OrderedDict)
# Immutable, and read by torch.load as they are.
_SIMPLE_TYPES = frozenset(
    {type(None), bool, float, complex, str, bytes, range, torch.Size, torch.dtype, torch.device}
)


def encode(content: Values, tensors: CollectedTensors, *, prefix: str = "") -> Facts:
    """Return a copy of named values that `dump` can write; their tensors go into `tensors`.

    The names of tensors begin with `prefix`. Raises ValueError, with the path, for a value that
    could not be restored.
    """
    write = functools.partial(_encode_leaf, tensors=tensors)
    try:
        return {name: _map_leaves(value, write, prefix + name) for name, value in content.items()}
    except RecursionError as error:
        raise ValueError("a value that contains itself can't be saved") from error


def _map_leaves(value: Any, change: Callable[[Any, str], Any], name: str) -> Any:
    """Return a copy of nested containers with changed leaves; `change` gets their names too."""
    if _is_leaf(value):
        return change(value, name)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    made = {key: _map_leaves(one, change, f"{name}/{name_component(key)}") for key, one in items}
    if not isinstance(value, dict):
        return type(value)(made.values())
    # With the versions of modules, which `load_state_dict` reads in an attribute of a state.
    copied = copy.copy(value)
    copied.update(made)
    return copied


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping) and not all(map(_is_simple, value)):
        return True
    return type(value) not in _CONTAINERS or _is_simple(value)


def _is_simple(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_simple, value))
    is_short = type(value) is int and value.bit_length() <= MOST_INTEGER_BITS
    return is_short or type(value) in _SIMPLE_TYPES


def _restore_value(value: Any, name: str) -> Any:
    """Return the copy of a value that a file gives back, of the same type."""
    dtype = f" of dtype {value.dtype!s:.60}" if hasattr(value, "dtype") else ""
    what = f"a {type(value).__name__}{dtype}"
    try:
        found = load(dump(value))
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything when it is pickled
        refuse_value(name, what)
    if type(found) is not type(value):
        refuse_value(name, what)
    return found


def decode(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was passed to `encode`; raise DamagedCheckpoint where it can't be."""

    def read(one: Any, _: str) -> Any:
        if type(one) is not Stored:
            return one
        tensor = tensors[one.name]
        if one.is_parameter:
            return nn.Parameter(tensor, one.requires_grad)
        return tensor.requires_grad_() if one.requires_grad else tensor

    with reading("a saved value can't be read", RuntimeError):
        return _map_leaves(content, read, "")


def references(content: Any) -> list[Stored]:
    """Return the tensors that an encoded value names."""
    return [one for one in tree_leaves(content) if type(one) is Stored]


# The file.

_NUMPY: Any = numpy._core if hasattr(numpy, "_core") else numpy.core
ALLOWED: list[Any] = [
    *(Stored, bytes, frozenset, range, numpy.ndarray, numpy.dtype),
    *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__),
    *(
        (getattr(_NUMPY.multiarray, name), f"numpy.{package}.multiarray.{name}")
        for name in ("_reconstruct", "scalar")
        for package in ("core", "_core")
    ),
]


def dump(content: Any) -> bytes:
    """Return the bytes of what `encode` returned."""
    with io.BytesIO() as stream:
        torch.save(content, stream)
        return stream.getvalue()


def load(data: bytes) -> Any:
    """Read what `dump` wrote; nothing in the file is run. Raises what torch.load raises."""
    with torch.serialization.safe_globals(ALLOWED), warnings.catch_warnings():
        # Some layouts of tensors warn that they are prototypes.
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(data), weights_only=True, map_location=_place_storage)


def _place_storage(storage: Any, location: str) -> Any:
    """Return the storage on this process's GPU if it was on one, else on the host."""
    if location.startswith("cuda") and torch.cuda.is_available():
        return storage.cuda()
    return storage


def load_foreign(data: bytes) -> Any:
    """Read a file that somebody else may have forged; raise DamagedCheckpoint."""
    with reading("the values can't be read", zipfile.BadZipFile, RuntimeError):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(record.file_size for record in archive.infolist()) > len(data):
                raise ValueError("its records are compressed")
            (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            # In bounded memory and time, before torch reads it without bounds.
            PickleReader(archive.read(name)).all()
        return load(data)
