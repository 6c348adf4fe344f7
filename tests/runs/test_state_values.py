"""Every accepted value is restored as the same value of the same type; others are refused.

python -m pytest tests/runs/test_state_values.py
"""

import math
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from curry_train.runs import DamagedCheckpoint
from curry_train.runs.values import (
    PLAIN_DTYPES,
    CollectedTensors,
    Stored,
    decode,
    dump,
    encode,
    load,
    references,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
]


def encoded(value):
    tensors = CollectedTensors()
    return load(dump(encode({"part.run": value}, tensors)["part.run"])), tensors.by_name


def there_and_back(value):
    content, tensors = encoded(value)
    assert {found.name for found in references(content)} == set(tensors)
    return decode(content, {name: tensor.clone() for name, tensor in tensors.items()})


def test_versions_of_modules_come_back_with_their_state():
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    assert there_and_back(state)._metadata == state._metadata


def assert_same(first, second):
    """Compare values with their types, bits, shapes and order."""
    leaves, form = tree_flatten(first)
    others, other_form = tree_flatten(second)
    assert form == other_form
    for one, other in zip(leaves, others, strict=True):
        assert type(one) is type(other)
        assert facts(one) == facts(other)


def facts(value):
    if isinstance(value, torch.Tensor):
        bits = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        bits = (bits.int_repr() if bits.is_quantized else bits.resolve_conj()).contiguous()
        found = bits.reshape(-1).view(torch.uint8).tolist()
        return value.shape, value.dtype, value.layout, value.requires_grad, found
    if isinstance(value, numpy.ndarray):
        return value.dtype, repr(value.tolist())
    return repr(value)


def with_dtype(dtype):
    return (torch.arange(4 * dtype.itemsize, dtype=torch.uint8) % 2).view(dtype).reshape(2, 2)


def test_values_that_json_would_change_are_restored():
    ones = torch.ones
    values = {
        "counter": Counter({3: 2, 1: 1.5}),
        "ordered": OrderedDict([("b", 1), (3, 4)]),
        "tuple as key": {(1, 2): ones(1), (True, None): 0.5},
        "odd keys": {frozenset({1}): [ones(1)], "x": 2},
        "equal text and number": {1: ones(1), "1": torch.zeros(1), "#1": ones(2)},
        "dots": {"a.b": ones(1), "a": {"b": torch.zeros(1)}, "a/b": ones(3)},
        "bytes": [b"\x00\xff", bytearray(b"x")],
        "torch's own types": [torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1")],
        "range and set": [range(1, 9, 3), {1, 2}, frozenset({"a"})],
        "not finite": [-0.0, math.inf, numpy.array([1.0, math.nan])],
        "numpy objects": numpy.array([[{"a": 1}, None], ["x", 2.5]], dtype=object),
        "numpy fields": numpy.ones(2, dtype=[("a", "<f4"), ("b", "<i2", (2,))]),
        "numpy scalars": [numpy.float64(0.1), numpy.str_("x"), numpy.bool_(True)],
        "parameter": nn.Parameter(ones(2)),
        "frozen parameter": nn.Parameter(ones(2), requires_grad=False),
        "leaf": ones(2, requires_grad=True),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "sparse rows": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(ones(2), 0.1, 3, torch.qint8),
    }
    assert_same(there_and_back({"x": [values]}), {"x": [values]})


@pytest.mark.parametrize("dtype", sorted(PLAIN_DTYPES, key=str), ids=str)
def test_tensors_of_every_dtype_are_restored(dtype):
    assert_same(there_and_back(with_dtype(dtype)), with_dtype(dtype))


def test_the_same_memory_is_saved_once_and_restored_as_the_same():
    tensor = torch.randn(4)
    content, tensors = encoded({"first": tensor, "again": [tensor], "part": tensor[:2]})
    found = decode(content, tensors)
    assert list(tensors) == ["part.run/first", "part.run/part"]
    assert found["again"][0] is found["first"]


class OwnTensor(torch.Tensor):
    """A tensor with a class of its own."""


Pair = namedtuple("Pair", "a b")


def endless():
    value = []
    value.append(value)
    return value


REFUSED = {
    "an object": (object, r"part.run/#0/x: a object can't be saved; convert it to"),
    "a named tuple": (lambda: Pair(1, 2), "a Pair"),
    "a defaultdict": (lambda: defaultdict(list), "a defaultdict can't be saved"),
    "a long integer": (lambda: 7**9000, "a int"),
    "four bits": (lambda: torch.ones(2, dtype=torch.uint8).view(torch.uint4), "a Tensor of dtype"),
    "an object in an array": (
        lambda: numpy.array([object()]),
        r"part.run/#0/x: a ndarray of dtype object",
    ),
    "an object as key": (lambda: {object(): 1}, r"part.run/#0/x: a dict can't be saved"),
    "a class of tensors": (
        lambda: torch.ones(1).as_subclass(OwnTensor),
        "a OwnTensor, a tensor of its own class, can't .* convert",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1)]), "a nested tensor"),
    "meta": (lambda: torch.ones(1, device="meta"), r"without values \(device meta\)"),
    "itself": (endless, "a value that contains itself"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_restored_is_refused_with_its_path(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        encoded([{"x": make()}])


def test_a_tensor_that_is_not_saved_is_damage():
    with pytest.raises(DamagedCheckpoint, match="can't be read"):
        decode([Stored("gone")], {})
