"""The benchmark of saving measures each saver on a small state; it asserts no figures.

python -m pytest tests/benchmarks/test_saving_cost.py
"""

import json

from saving_cost import main


def test_savers_are_compared_and_no_file_is_left_behind(tmp_path, capsys):
    words = ["--mib", "12", "--every", "3", "--batch", "4", "--rounds", "1", "--small-steps", "60"]
    words += ["--small-batches", "4", "8"]
    words += ["--savers", "none", "ours", "dcp", "--folder", str(tmp_path)]
    main([*words, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["state_bytes"] > 12 * 2**20
    assert list(found["savers"]) == ["none", "ours", "dcp"]
    for each in found["savers"].values():
        assert min(each["all_steps"], each["steps_under_way"], each["slowest_step"]) > 0
    assert found["savers"]["none"]["all_steps"] == 1
    assert [each["batch"] for each in found["small"]] == [4, 8]
    for each in found["small"]:
        assert each["lowest"] <= each["loop"] <= each["highest"]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert capsys.readouterr().out.count(", at most") == 4
