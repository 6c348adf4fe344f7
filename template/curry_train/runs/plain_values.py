"""Non-tensor state as JSON, including Python types that JSON has no form for.

Tuples, counters, keys that are not text, infinities and bytes are restored with their types.
Tensors inside are taken out, and put back by name. Nothing is ever unpickled.
Proof: `python -m pytest tests/test_state_values.py`.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .errors import DamagedCheckpoint

# A mapping whose only key starts with this stands for a value that JSON has no form for.
MARK = "$"
_SEQUENCE_MARKS: dict[type, str] = {tuple: "$tuple", set: "$set", deque: "$deque"}


def encode(value: Any, path: str, *, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return `value` in a form that JSON holds; its tensors go into `tensors` under their path."""

    def inner(item: Any, name: Any) -> Any:
        return encode(item, f"{path}.{name}", tensors=tensors)

    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor) and tensors is not None:
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is list:
        return [inner(item, index) for index, item in enumerate(value)]
    if type(value) in _SEQUENCE_MARKS:
        items = [inner(item, index) for index, item in enumerate(value)]
        return {_SEQUENCE_MARKS[type(value)]: items}
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        return _encode_mapping(value, inner)
    if hasattr(value, "tolist") and hasattr(value, "dtype") and not isinstance(value, Tensor):
        return {"$array": [str(value.dtype), encode(value.tolist(), path)]}

    raise ValueError(
        f"{path} is a {type(value).__name__}, which JSON can't hold, and pickled objects are never "
        f"loaded: convert it to numbers, text, lists, mappings or tensors"
    )


def _encode_mapping(value: Mapping[Any, Any], inner: Callable[[Any, Any], Any]) -> dict[str, Any]:
    if type(value) is Counter:
        return {"$counter": [[inner(key, "key"), count] for key, count in value.items()]}
    if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
        return {key: inner(item, key) for key, item in value.items()}
    return {"$items": [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}


def decode(value: Any, *, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return the value that was passed to `encode`."""

    def inner(item: Any) -> Any:
        return decode(item, tensors=tensors)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value

    mark = next(iter(value), "")
    if len(value) != 1 or not mark.startswith(MARK):
        return {key: inner(item) for key, item in value.items()}

    content = value[mark]
    makers: dict[str, Callable[[], Any]] = {
        "$float": lambda: float(content),
        "$bytes": lambda: base64.b64decode(content, validate=True),
        "$tuple": lambda: tuple(map(inner, content)),
        "$set": lambda: set(map(inner, content)),
        "$deque": lambda: deque(map(inner, content)),
        "$items": lambda: {inner(key): inner(item) for key, item in content},
        "$counter": lambda: Counter({inner(key): count for key, count in content}),
        "$array": lambda: _array(*content),
        "$tensor": lambda: (tensors or {})[content],
    }
    try:
        return makers[mark]()
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            f"saved value {value!r:.80} can't be read ({type(error).__name__}: {error})"
        ) from error


def _array(dtype: str, content: Any) -> Any:
    import numpy

    array_dtype = numpy.dtype(dtype)
    if array_dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype} is not allowed")
    array = numpy.array(content, dtype=array_dtype)
    return array if array.ndim else array[()]
