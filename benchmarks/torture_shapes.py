"""Build pickles that call code when read, for each place in a checkpoint's index.

Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import copy
import dataclasses
import io
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def calls(canary: str) -> dict[str, Any]:
    return {
        "os.mkdir": Call(os.mkdir, canary),
        "os.system": Call(os.system, f"touch {canary}"),
        "exec": Call(exec, f"open({canary!r}, 'w')"),
        "eval": Call(eval, f"open({canary!r}, 'w')"),
        "open": Call(io.open, canary, "w"),
        "Popen": Call(subprocess.Popen, ["touch", canary]),
        "print to": Call(getattr, Call(io.open, canary, "w"), "write"),
        "torch.save": Call(torch.save, 1, canary),
    }


def opcodes(canary: str) -> dict[str, bytes]:
    """Write pickles by hand, as no pickler would."""
    text = canary.encode()
    short = b"\x8c" + bytes([len(text)]) + text
    return {
        "GLOBAL": b"cos\nmkdir\n(V" + text + b"\ntR.",
        "GLOBAL of posix": b"cposix\nmkdir\n(V" + text + b"\ntR.",
        "INST": b"(V" + text + b"\nios\nmkdir\n.",
        "OBJ": b"(cos\nmkdir\nV" + text + b"\no.",
        "NEWOBJ": b"csubprocess\nPopen\n(](Vtouch\nV" + text + b"\netl\x81.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + short + b"\x85R.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93\x8c\x05mkdir\x86R.",
        "through what is allowed": b"\x80\x04\x8c\x13torch.serialization\x8c\x0b_get_layout\x93"
        + short
        + b"\x85R.",
        "globals of what is allowed": b"\x80\x04\x8c\x13torch.serialization"
        b"\x8c\x17_get_layout.__globals__\x93.",
        "setstate of what is allowed": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)R}(\x8c\x09__class__"
        + short
        + b"ub.",
        "PERSID": b"P" + text + b"\n.",
        "EXT": b"\x80\x02\x82\x01.",
        "deep": b"(" * 100_000 + b".",
        "memo": b"\x80\x04h\xff.",
    }


def places(metadata: Any, call: Any) -> Iterator[tuple[str, Any]]:
    """Yield indexes of a checkpoint, each with a call at another place."""
    name, entry = next(iter(metadata.state_dict_metadata.items()))
    index, place = next(iter(metadata.storage_data.items()))
    yield "whole", call
    yield "planner data", dataclasses.replace(metadata, planner_data=call)
    yield "nested", dataclasses.replace(metadata, planner_data={"a": [(1, {2: call})]})
    yield "storage meta", dataclasses.replace(metadata, storage_meta=call)
    yield "version", dataclasses.replace(metadata, version=call)
    yield (
        "an entry",
        dataclasses.replace(
            metadata, state_dict_metadata={**metadata.state_dict_metadata, name: call}
        ),
    )
    yield (
        "one more entry",
        dataclasses.replace(
            metadata, state_dict_metadata={**metadata.state_dict_metadata, "x": call}
        ),
    )
    yield "a chunk", _with(metadata, name, dataclasses.replace(entry, chunks=[call]))
    yield "a size", _with(metadata, name, dataclasses.replace(entry, size=call))
    properties = copy.copy(entry.properties)
    yield "properties", _with(metadata, name, dataclasses.replace(entry, properties=call))
    properties.__dict__["more"] = call
    yield (
        "an attribute",
        _with(metadata, name, dataclasses.replace(entry, chunks=[*entry.chunks, call])),
    )
    yield (
        "a place",
        dataclasses.replace(metadata, storage_data={**metadata.storage_data, index: call}),
    )
    moved = copy.copy(place)
    moved.relative_path = call
    yield (
        "a path",
        dataclasses.replace(metadata, storage_data={**metadata.storage_data, index: moved}),
    )
    as_bytes = dataclasses.replace(
        metadata,
        state_dict_metadata={**metadata.state_dict_metadata, name: BytesStorageMetadata()},
        planner_data=call,
    )
    yield "beside bytes", as_bytes


def _with(metadata: Any, name: str, entry: Any) -> Any:
    return dataclasses.replace(
        metadata, state_dict_metadata={**metadata.state_dict_metadata, name: entry}
    )
