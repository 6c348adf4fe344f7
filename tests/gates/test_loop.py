"""The checks of a user's loop find planted faults at their line, and pass healthy loops.

Run: `python -m pytest tests/gates/test_loop.py`.
"""

import inspect

import faulty_loops
import healthy_loops
import held_out_faulty_loops
import held_out_healthy_loops
import known_bugs
import loops
import pytest
import torch

from curry_train.gates.loop import CHECKS, preflight

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of some of these faults itself


def failed(train):
    torch.manual_seed(0)
    return {
        verdict.gate.removeprefix("loop/"): verdict
        for verdict in preflight(train)
        if verdict.passed is False
    }


@pytest.mark.parametrize(
    "train", [*loops.HEALTHY, *healthy_loops.HEALTHY, *held_out_healthy_loops.HEALTHY]
)
def test_a_healthy_loop_passes(train):
    assert failed(train) == {}


@pytest.mark.parametrize(
    ("check", "train"),
    [
        pytest.param(check, one, id=one.__name__)
        for module in (loops, faulty_loops, held_out_faulty_loops, known_bugs)
        for check, faulty in module.FAULTY.items()
        for one in faulty
    ],
)
def test_a_fault_is_found_at_its_line(check, train):
    found = failed(train)
    assert check in found, found
    lines, first = inspect.getsourcelines(train)
    (wrong,) = [
        number for number, line in enumerate(lines, start=first) if line.endswith("# here\n")
    ]
    assert found[check].measured.startswith(f"{train.__module__}.py:{wrong}: ")
    assert found[check].hint


def test_each_check_finds_a_fault():
    assert {*loops.FAULTY, *faulty_loops.FAULTY} == {*CHECKS}
