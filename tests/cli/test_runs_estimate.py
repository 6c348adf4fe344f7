"""Estimated bytes on the disk equal known figures.

python -m pytest tests/cli/test_runs_estimate.py
"""

from ..command_runs import call, read_json


def test_estimate_of_a_policy():
    output = call("estimate --parameters 7e9 --json e.json")
    assert "retained in total" in output
    assert "756" in output
    found = read_json("e.json")
    sizes = [found[name] // 10**9 for name in ("checkpoint", "best", "total", "most")]
    assert sizes == [84, 28, 756, 840]
    assert found["kept"] == {"rollback": 420e9, "recovery": 252e9, "best-k": 84e9}
    call("estimate --parameters 7e15 --folder .", status=1)
    output = call("estimate --parameters 1e6 retention.rollback_keep=2 --folder .")
    assert "MB" in output
    assert "0.00" not in output
    assert "enough" in output
