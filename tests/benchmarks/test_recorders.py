"""Each program of benchmarks/ starts, and `make long` runs the smallest case of those that record.

python -m pytest tests/benchmarks/test_recorders.py
"""

import functools
import runpy
import sys

import pytest

from ..command_runs import finished, read_json
from ..tree import ROOT

PROGRAMS = {
    path.stem: path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if "parse_args(" in path.read_text()
}
assert len(PROGRAMS) >= 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_starts(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(PROGRAMS[name]), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAMS[name]), run_name="__main__")
    assert not ended.value.code
    assert "usage: " in capsys.readouterr().out.lower()


SAVING = "--mib 12 --rounds 1 --seconds 2 --small-steps 60"
# The words of the smallest run, and figures of its record.
SMALLEST = {
    "boxes": ("--each 1", {"repeating.to_the_bit_and_named": 1, "changing.said_so": 1}),
    "locate": (
        "--part faults --part equal --count 2 --only sampled",
        {"score.faults": 2, "score.named": 2, "score.equal_pairs_accused": 0},
    ),
    "preflight": (
        "--only loops.undivided",
        {"score.faults": 2, "score.faults_found_at_their_line": 2, "score.healthy": 0},
    ),
    "saving_cost commit": (SAVING, {"integrity.pairs": 1, "stall.pairs": 1, "loading.pairs": 1}),
    "saving_cost memory": (SAVING, {}),
    "saving_cost steps": (SAVING, {"small.0.batch": 32, "small.1.batch": 512}),
    "saving_cost cadence": (SAVING, {}),
    "zoo": ("--only snntorch_net", {"summary.status_0": 1, "summary.plans_equal_to_the_byte": 1}),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_run_of_a_recorder_writes_its_record(name, tmp_path):
    words, figures = SMALLEST[name]
    program, *part = name.split()
    words = [*part, *words.split(), "--json", "found.json"]
    finished(sys.executable, PROGRAMS[program], *words, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = read_json(tmp_path / "found.json")
    for key, value in figures.items():
        steps = [int(step) if step.isdigit() else step for step in key.split(".")]
        assert functools.reduce(lambda one, step: one[step], steps, found) == value, key
