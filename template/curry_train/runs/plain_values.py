"""State that is no tensor, as JSON: numbers, text, lists and mappings, and what of Python JSON would bend.

Tuples, counters, keys that are no text, infinities and bytes come back as what they were. Tensors inside are taken
out, and put back by name. Nothing is ever unpickled. Proof: `python -m pytest tests/test_state_values.py`.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .errors import DamagedCheckpoint

MARK = "$"  # a mapping whose only key starts so stands for something else


def encode(value: Any, path: str, *, tensors: dict[str, Tensor] | None = None) -> Any:
    """`value` as JSON holds it; its tensors go into `tensors` under their path."""

    def inner(part: Any, name: Any) -> Any:
        return encode(part, f"{path}.{name}", tensors=tensors)

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
        return [inner(part, index) for index, part in enumerate(value)]
    for kind, mark in ((tuple, "$tuple"), (set, "$set"), (deque, "$deque")):
        if type(value) is kind:
            return {mark: [inner(part, index) for index, part in enumerate(value)]}
    if type(value) in (dict, OrderedDict, defaultdict):
        if all(isinstance(key, str) for key in value) and not any(
            key.startswith(MARK) for key in value
        ):
            return {key: inner(part, key) for key, part in value.items()}
        return {"$items": [[inner(key, "key"), inner(part, key)] for key, part in value.items()]}
    if type(value) is Counter:
        return {"$counter": [[inner(key, "key"), count] for key, count in value.items()]}
    if hasattr(value, "tolist") and hasattr(value, "dtype") and not isinstance(value, Tensor):
        return {"$array": [str(value.dtype), encode(value.tolist(), path)]}
    raise ValueError(
        f"{path} is a {type(value).__name__}, which JSON can't hold and nothing here unpickles: make it numbers, text, "
        f"lists, mappings or tensors"
    )


def decode(value: Any, *, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """What `encode` was given."""

    def inner(part: Any) -> Any:
        return decode(part, tensors=tensors)

    if isinstance(value, list):
        return [inner(part) for part in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if len(value) != 1 or not mark.startswith(MARK):
        return {key: inner(part) for key, part in value.items()}
    content = value[mark]
    makers: dict[str, Callable[[], Any]] = {
        "$float": lambda: float(content),
        "$bytes": lambda: base64.b64decode(content, validate=True),
        "$tuple": lambda: tuple(map(inner, content)),
        "$set": lambda: set(map(inner, content)),
        "$deque": lambda: deque(map(inner, content)),
        "$items": lambda: {inner(key): inner(part) for key, part in content},
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

    found = numpy.dtype(dtype)
    if found.kind not in "biuf":
        raise ValueError(f"array of {dtype}")
    array = numpy.array(content, dtype=found)
    return array if array.ndim else array[()]
