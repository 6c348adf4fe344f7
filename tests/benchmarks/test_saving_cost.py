"""What saving costs is measured on a small state; no figure is asserted.

python -m pytest tests/benchmarks/test_saving_cost.py
"""

import json

import pytest

from saving_cost import main

SMALL = (
    "--mib 12 --rounds 1 --every 3 --batch 4"
    " --seconds 2 --overhead 0.9 --small-steps 60 --small-batches 4 8"
)


@pytest.mark.parametrize(
    ("what", "goals"), [("commit", 2), ("memory", 2), ("steps", 2), ("cadence", 2)]
)
def test_each_cost_is_measured_and_no_file_is_left_behind(what, goals, tmp_path, capsys):
    record = tmp_path / "found.json"
    main([what, *SMALL.split(), "--folder", str(tmp_path), "--json", str(record)])
    assert capsys.readouterr().out.count(", at most") == goals
    found = json.loads(record.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    if what == "commit":
        assert all(found[name]["pairs"] == 1 for name in ("integrity", "stall"))
    if what == "steps":
        assert [each["batch"] for each in found["small"]] == [4, 8]
    if what == "cadence":
        assert found["foreground"]["saves"] >= 1
