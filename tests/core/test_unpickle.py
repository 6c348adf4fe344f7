"""A pickle is read without importing or calling anything, in bounded memory.

python -m pytest tests/core/test_unpickle.py
"""

import collections
import io
import os
import pickle
import struct

import pytest

from curry_train.core.unpickle import PickleReader, RefusedPickle, StandIn
from curry_train.core.unpickle import read_plain as read
from torture_shapes import Call


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_is_read(protocol):
    value = {
        "a": [1, 2.5, -300, 70_000, 2**70, None, True, "é'\\"],
        (1, "b"): ({}, [()], (1, 2, 3), False, ""),
    }
    if protocol > 3:  # which earlier ones write as calls
        value["sets"] = [{3, -4}, frozenset("ab"), frozenset(), b"bytes", b""]
    assert read(pickle.dumps(value, protocol)) == value
    assert PickleReader(pickle.dumps(value, protocol)).all(1) == [value]


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_is_recorded_and_never_made(tmp_path, protocol):
    canary = str(tmp_path / "canary")
    data = pickle.dumps([Call(os.mkdir, canary)], protocol)
    with pytest.raises(RefusedPickle, match=r"names .*mkdir"):
        read(data)
    reader = PickleReader(data)
    (found,) = reader.all()[0]
    assert isinstance(found, StandIn)
    assert [name.rpartition(".")[2] for name in reader.named] == ["mkdir"]
    assert not os.path.lexists(canary)


class Holder:
    def __init__(self):
        self.value = 7


def test_what_holds_elements_entries_or_a_state_is_read_over():
    values = [collections.OrderedDict(a=1), collections.deque([1, 2]), Holder()]
    reader = PickleReader(pickle.dumps([*values, 3]))
    (found,) = reader.all()
    assert [isinstance(one, StandIn) for one in found] == [True, True, True, False]
    assert found[2].state == {"value": 7}
    assert reader.named == {f"{__name__}.Holder", "collections.OrderedDict", "collections.deque"}


def test_a_reference_to_outside_is_read_as_the_text_that_it_is():
    class Referring(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", 3) if value == "here" else None

    stream = io.BytesIO()
    Referring(stream).dump(["here"])
    assert read(stream.getvalue()) == [("storage", 3)]


DEEP_KEY = b"}" + b")" + b"\x85" * 100_000 + b"K\x01s."
WIDE_KEY = b"})" + b"2\x86" * 60 + b"K\x01s."
HOSTILE = {
    "nothing": b"",
    "unknown opcode": b"\xff.",
    "text of 2**64 bytes": b"\x8d" + b"\xff" * 8 + b".",
    "integer of 2 GiB": b"\x8b" + struct.pack("<I", 2**31 - 1) + b"\x01.",
    "text that is no UTF-8": b"\x8c\x01\xff.",
    "entry of a list": b"]K\x01K\x02s.",
    "key that is a list": b"}]K\x01s.",
    "key nested a hundred thousand deep": DEEP_KEY,
    "key of 2**60 elements": WIDE_KEY,
    "state of a list": b"]}b.",
    "millions of lists": b"(" + b"]" * 8_000_000 + b"l.",
}


@pytest.mark.parametrize("title", HOSTILE)
def test_a_forged_pickle_is_refused_in_one_line(title, monkeypatch):
    monkeypatch.setattr("curry_train.core.unpickle.MOST_SECONDS", 1)
    with pytest.raises(RefusedPickle) as refused:
        PickleReader(HOSTILE[title]).all()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_forged_index_of_the_memo_takes_no_memory():
    """Python's unpickler would make room for the index: 64 GiB."""
    with pytest.raises(RefusedPickle, match="too much memory"):
        read(b"]r\xff\xff\xff\x7f0j\xff\xff\xff\x7f.")


def test_a_pickle_that_is_cut_anywhere_is_refused():
    data = pickle.dumps({"a": [1, 2.5, "text", (1, 2)], "b": b"bytes"})
    for length in range(0, len(data), 7):
        with pytest.raises(RefusedPickle):
            PickleReader(data[:length]).all(1)
