"""Estimated bytes on the disk equal known figures.

python -m pytest tests/cli/test_runs_estimate.py
"""

import pytest
from command_runs import flat, ran

from curry_train.cli.runs_estimate import estimate_disk
from curry_train.runs.policy_config import PolicyConfig

SEVEN = 7 * 10**9


def test_7b_keeps_756_gb_and_not_924_because_best_k_is_parameters_only():
    found = estimate_disk(SEVEN, PolicyConfig(), dtype="float32")
    assert found["checkpoint"] == 84 * 10**9
    assert found["best"] == 28 * 10**9
    assert found["kept"] == {
        "rollback": 420 * 10**9,
        "recovery": 252 * 10**9,
        "best-k": 84 * 10**9,
    }
    assert found["total"] == 756 * 10**9
    assert found["in_flight"] == 84 * 10**9
    assert found["most"] == 840 * 10**9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollback_every=[1"], "rollback_every=[1 is not a YAML value"),
        (
            ["retention=5", "retention.rollback_keep=2"],
            "retention is 5, so that retention.rollback_keep can't be set",
        ),
        (
            ["retention.rollback_keep=2", "retention=5"],
            "checkpoint.retention must be a block of keys, got 5",
        ),
        (["rollback_every.x=1"], "rollback_every"),
        (["rollback_every=1", "rollback_every.x=1"], "rollback_every is 1"),
    ],
)
def test_words_that_set_nothing_sensible_end_in_one_line(words, message):
    ended = ran("runs", "estimate", "--parameters", "7e9", *words, status=2)
    assert message in flat(ended.output)
