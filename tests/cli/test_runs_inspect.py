"""The command `runs inspect`: text, JSON and exit status.

python -m pytest tests/cli/test_runs_inspect.py
"""

import json
import math
import os
from pathlib import Path

import torch

from torture_shapes import Call

from ..command_runs import call


def test_inspect_prints_tensors_hashes_and_whether_it_is_whole():
    values = torch.tensor([[1.0, math.nan]])
    torch.save({"a": torch.ones(3), "b": values, "epoch": 3}, "a.pt")
    text = call("inspect a.pt")
    # Tensors with NaN come first.
    assert text.splitlines()[1].split() == ["b", "1x2", "float32", "1"]
    assert "other values: epoch: 3" in text
    assert "NaN: 1, inf: 0" in text
    assert "CRC-32 match" in text
    assert text.splitlines()[-1] == "whole: yes"

    text = call("inspect a.pt --json -")
    found = json.loads(text[text.index("\n{") :])
    assert (found["whole"], found["format"]) == (True, "torch.save file")
    assert [one["nan"] for one in found["tensors"]] == [0, 1]


def test_a_hostile_file_ends_with_1_and_runs_nothing():
    names = "\x1b[2J\n" * 3
    torch.save({names: Call(os.mkdir, "canary")}, "a.pt")
    text = call("inspect a.pt", status=1)
    assert "wrong: it is hostile: loading it would call posix.mkdir" in text
    assert text.splitlines()[-1] == "whole: no"
    assert "\x1b" not in text
    assert not Path("canary").exists()
