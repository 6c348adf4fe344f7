"""Build pickles that call code when they are read.

Proof: `python -m pytest tests/cli/test_inspection.py`.
"""

import io
import os
import subprocess
from typing import Any

import torch


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
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
        "dotted name of a path": b"\x80\x04\x8c\x07pathlib\x8c\x08os.mkdir\x93" + short + b"\x85R.",
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
