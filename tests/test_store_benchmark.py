"""The benchmark of the store measures what it says, on a small state; the figures are recorded, not asserted here.

python -m pytest tests/test_store_benchmark.py
"""

import json

from curry_train.store_benchmark import main


def test_both_ratios_are_recorded_and_nothing_is_left(tmp_path, capsys):
    main(["--mib", "12", "--pairs", "2", "--folder", str(tmp_path), "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["state_bytes"] > 12 * 2**20
    for what in ("integrity", "stall"):
        assert 0 < found[what]["lowest"] <= found[what]["ratio"] <= found[what]["highest"]
        assert found[what]["pairs"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert capsys.readouterr().out.count("of plain, at most") == 2
