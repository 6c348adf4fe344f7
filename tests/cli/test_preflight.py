"""`curry-train preflight` prints its verdict first, and ends with the promised status.

Run: `python -m pytest tests/cli/test_preflight.py`.
"""

from pathlib import Path

import pytest

from curry_train.cli import preflight
from curry_train.gates.loop_run import LoopFailed
from curry_train.gates.verdict import Verdict, not_applicable

from ..command_runs import flat, ran, read_json, require_narrow

HELD = Verdict("loop/mode", True, "held", "training mode in training", ran=("loop",))
FAILED = Verdict(
    "loop/zeroed",
    False,
    "train.py:14: a step with gradients of the step before",
    "gradients are set to zero once per step",
    "call optimizer.zero_grad() once per step, before the first backward call of its window",
    ran=("loop",),
)
UNKNOWN = not_applicable("loop/scaler", "the loop has no scaler that is on")


@pytest.fixture
def run(monkeypatch):
    Path("train.py").write_text("")

    def invoke(found, *words, status):
        def program(kind, arguments, *, num_steps, num_ranks, num_layers):
            assert (kind, arguments) == ("script", ["train.py", "--rate", "1"])
            assert (num_steps, num_ranks, num_layers) == (8, 1, 0)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(preflight, "preflight_program", program)
        return ran("preflight --script train.py", *words, "-- --rate 1", status=status)

    return invoke


def test_what_failed_is_printed_with_what_to_do(run):
    output = run([HELD, FAILED, UNKNOWN], status=1).output
    assert "1 of 2 checks FAILED" in flat(output)
    assert "\nzeroed: train.py:14: a step with gradients of the step before\n" in output
    assert "\nheld: mode\n" in output
    assert "not applicable: scaler (the loop has no scaler that is on)" in output
    require_narrow(output)


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        ([HELD], 0, "1 checks held"),
        ([UNKNOWN], 2, "nothing was checked: the loop has no scaler that is on"),
        (LoopFailed("ValueError: no: correct your train.py, line 7"), 2, "ValueError: no"),
    ],
)
def test_the_status_is_that_of_the_verdicts(run, found, status, text):
    assert text in flat(run(found, status=status).output)


def test_results_are_written_as_json(run):
    run([HELD, FAILED], "--json found.json", status=1)
    found = read_json("found.json")
    assert [one["gate"] for one in found["results"]] == ["loop/mode", "loop/zeroed"]
    assert found["steps"] == 8
