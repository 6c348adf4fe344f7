"""Encode generators and plain values as JSON, and restore them exactly.

Each rank has its own state, so its keys end in the rank.

Proof: `python -m pytest tests/runs/test_state_values.py tests/runs/test_state.py`.
"""

import base64
import hashlib
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .ranks import DamagedCheckpoint

# Non-tensor state as JSON, including Python types that JSON has no form for.

# A mapping whose only key starts with this stands for a value that JSON has no form for.
ENCODED_VALUE_MARK = "$"
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
    if all(isinstance(key, str) and not key.startswith(ENCODED_VALUE_MARK) for key in value):
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
    if len(value) != 1 or not mark.startswith(ENCODED_VALUE_MARK):
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


# Random state of torch, CUDA, Python, numpy and the user's own generators.


@dataclass(frozen=True)
class RandomState:
    """The state of all generators at one moment."""

    # The state of torch's generators, by name.
    tensors: Mapping[str, Tensor]
    # The state of the other generators, as JSON.
    values: Mapping[str, Any] = field(default_factory=dict)


def take_random_state(generators: Mapping[str, torch.Generator] | None = None) -> RandomState:
    """Return the current state of every generator."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            tensors[f"cuda-{index}"] = torch.cuda.get_rng_state(index)
    for name, generator in (generators or {}).items():
        tensors[f"generator-{name}"] = generator.get_state()

    values = {"python": encode(random.getstate(), "python")}
    if "numpy" in sys.modules:
        values["numpy"] = encode(sys.modules["numpy"].random.get_state(legacy=False), "numpy")
    return RandomState(tensors, values)


def restore_random_state(
    state: RandomState, generators: Mapping[str, torch.Generator] | None = None
) -> list[str]:
    """Restore every generator; return a note for each one that could not be restored."""
    notes = []
    own = generators or {}
    for name, saved in state.tensors.items():
        kind, _, key = name.partition("-")
        if kind == "torch":
            torch.set_rng_state(saved)
        elif kind == "generator" and key in own:
            own[key].set_state(saved)
        elif kind == "cuda" and torch.cuda.is_available() and int(key) < torch.cuda.device_count():
            torch.cuda.set_rng_state(saved, int(key))
        else:
            notes.append(f"the generator {name} was saved, but does not exist here")

    for name in own:
        if f"generator-{name}" not in state.tensors:
            notes.append(f"the generator {name} was not saved")

    if "python" in state.values:
        random.setstate(decode(state.values["python"]))
    if "numpy" in state.values:
        import numpy

        numpy.random.set_state(decode(state.values["numpy"]))
    elif "numpy" in sys.modules:
        notes.append("numpy's generator was not saved: numpy was not imported at the save")
    return notes


def seed_new_rank(
    state: RandomState, rank: int, generators: Mapping[str, torch.Generator] | None = None
) -> None:
    """Seed the generators of a rank that did not exist at the save.

    The seed comes from the state of the first rank and this rank's number.
    """
    first_state = state.tensors["torch"].numpy().tobytes()
    digest = hashlib.sha256(first_state + rank.to_bytes(8, "big")).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1

    # This seeds CUDA's generators too.
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    for generator in (generators or {}).values():
        generator.manual_seed(seed)
