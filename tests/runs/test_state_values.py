"""Values other than tensors are stored as JSON and restored unchanged.

python -m pytest tests/runs/test_state_values.py
"""

import json
import math
from collections import Counter, deque

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from curry_train.runs import DamagedCheckpoint
from curry_train.runs.random_state import decode, encode

plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


def there_and_back(value, tensors=None):
    return decode(
        json.loads(json.dumps(encode(value, "v", tensors=tensors), allow_nan=False)),
        tensors=tensors,
    )


@given(values)
def test_nested_values_are_restored(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 2, 1: 1}),
        deque([1, 2]),
        {1, 2},
        {"$tuple": [1]},
        {"$": 1},
        -0.0,
        math.inf,
        {(1, 2): "x"},
        b"\x00\xff",
    ],
)
def test_values_that_json_would_change_are_restored(value):
    found = there_and_back(value)
    assert (found, type(found), repr(found)) == (value, type(value), repr(value))


def test_nan_arrays_and_tensors_are_restored():
    assert math.isnan(there_and_back(math.nan))
    array = numpy.arange(4, dtype=numpy.uint32)
    found = there_and_back({"a": array, "b": numpy.float64(0.1)})
    assert (found["a"] == array).all()
    assert (found["a"].dtype, found["b"]) == (array.dtype, 0.1)
    tensors = {}
    tensor = torch.randn(3)
    assert there_and_back([1, {"t": tensor}], tensors)[1]["t"].equal(tensor)
    assert list(tensors) == ["v.1.t"]


@pytest.mark.parametrize("value", [object(), print, 1j, type, torch.ones(1)])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"run.0.x is a .*, which JSON can't hold"):
        encode([{"x": value}], "run")


@pytest.mark.parametrize(
    "value",
    [
        {"$call": 1},
        {"$tuple": 3},
        {"$array": ["object", [1]]},
        {"$tensor": "gone"},
        {"$bytes": "%%"},
        {"$float": "x"},
    ],
)
def test_unknown_type_marks_are_damage(value):
    with pytest.raises(DamagedCheckpoint):
        decode(value)
