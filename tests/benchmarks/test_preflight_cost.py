"""The benchmark of preflight scores loops, and measures each with and without it.

Run: `python -m pytest tests/benchmarks/test_preflight_cost.py`.
"""

import json

import pytest
from click.testing import CliRunner

from preflight import main


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_faulty_and_healthy_loops_are_scored(tmp_path):
    record = tmp_path / "preflight.json"
    ended = CliRunner().invoke(main, ["--only", "loops.undivided", "--json", str(record)])
    assert ended.exit_code == 0, ended.output
    found = json.loads(record.read_text())
    score = found["score"]
    assert (score["faults"], score["faults_found_at_their_line"], score["healthy"]) == (3, 3, 0)
    assert all(one["seconds_alone"] > 0 for one in found["loops"])
    ended = CliRunner().invoke(main, ["--only", "loops.accumulated"])
    assert "healthy: 1\nalarms: 0\n" in ended.output
