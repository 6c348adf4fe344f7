"""The benchmark of `runs locate` plants, records and scores in each of its parts.

Run: `python -m pytest tests/benchmarks/test_locate_score.py`.
"""

import json

import pytest
from click.testing import CliRunner

from locate import main
from locate_faults import KINDS, Planter, record
from locate_models import MODELS, quietly


@pytest.mark.long
def test_faults_and_equal_pairs_are_scored(tmp_path):
    path = tmp_path / "locate.json"
    words = ["--part", "faults", "--part", "equal", "--count", "2", "--only", "sampled"]
    ended = CliRunner().invoke(main, [*words, "--json", str(path)])
    assert ended.exit_code == 0, ended.output
    found = json.loads(path.read_text())
    assert found["score"]["faults"] == found["score"]["named"] == 2
    assert (found["score"]["equal_pairs"], found["score"]["equal_pairs_accused"]) == (2, 0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_each_kind_of_fault_has_a_place_in_some_model(tmp_path):
    with quietly():
        plain = {
            name: record(name, tmp_path / name, operations_in_step=2)
            for name in ("encoder", "convolutions")
        }
    drawn = {
        kind
        for kind in KINDS
        for one in plain.values()
        if Planter(one, one, "0").draw(kind) is not None
    }
    assert drawn == set(KINDS)
    assert len(MODELS) == 13
