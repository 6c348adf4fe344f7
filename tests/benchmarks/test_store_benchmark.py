"""The store benchmark measures what it claims on a small state; it asserts no figures.

python -m pytest tests/benchmarks/test_store_benchmark.py
"""

import json

import pytest

from cadence_benchmark import main as cadence_main
from store_benchmark import main


def test_both_ratios_are_recorded_and_no_file_is_left_behind(tmp_path, capsys):
    main(
        [
            "--mib",
            "12",
            "--pairs",
            "2",
            "--folder",
            str(tmp_path),
            "--json",
            str(tmp_path / "found.json"),
        ]
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["state_bytes"] > 12 * 2**20
    for what in ("integrity", "stall"):
        assert 0 < found[what]["lowest"] <= found[what]["ratio"] <= found[what]["highest"]
        assert found[what]["pairs"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert capsys.readouterr().out.count("of plain, at most") == 2


def test_a_cadence_is_measured_with_its_bound_and_no_file_is_left_behind(tmp_path, capsys):
    words = ["--mib", "12", "--seconds", "2", "--overhead", "0.9", "--folder", str(tmp_path)]
    cadence_main([*words, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("foreground", "background"):
        row = found[name]
        assert row["saves"] >= 1, row
        assert 0 < row["saving_seconds"] < row["seconds"]
        assert row["bound"] == 0.9
    # sqrt(2 * 60 * 86400) = 3219.94 s; d / 2M = 3.4722e-4; with Daly's further terms the interval
    # from save to save is 3180.1 s
    assert found["young_daly"]["minutes"]["24h"] == pytest.approx(3180.1 / 60, abs=0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert capsys.readouterr().out.count("of 90.00%") == 2
