"""The benchmark of boxes counts a replay that names its fault, and one that does not repeat.

Run: `python -m pytest tests/benchmarks/test_boxes.py`.
"""

import json
import os
import subprocess
import sys

import pytest
from tree import ROOT

from boxes import cases
from boxes_program import CHANGING, FAULTS, PLACES


def test_the_cases_have_each_fault_and_each_model():
    found = list(cases(40))
    assert len(found) == 80
    assert {fault for _, fault, _ in found} == {*FAULTS, *CHANGING}
    assert {name for name, _, _ in found} == {*PLACES}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_planted_operation_is_named_and_a_clock_does_not_repeat(tmp_path):
    paths = os.pathsep.join(str(ROOT / name) for name in ("template", "benchmarks"))
    command = [sys.executable, str(ROOT / "benchmarks/boxes.py"), "--each", "1", "--times", "2"]
    ended = subprocess.run(
        [*command, "--json", str(tmp_path / "boxes.json")],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "boxes.json").read_text())
    assert found["repeating"] == {"boxes": 1, "to_the_bit_and_named": 1}
    assert found["changing"]["said_so"] == 1
    repeated, changing = found["cases"]
    assert repeated["said"][1].startswith(
        "step 22, forward: aten.sqrt.default in 0.0.1, boxes_program.py:"
    )
    assert "hardware, a race" in changing["said"][0]
    assert "aten.mul.Tensor in 0.0.1" in changing["said"][0]
