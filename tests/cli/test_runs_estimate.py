"""Estimated bytes on the disk equal known figures.

python -m pytest tests/cli/test_runs_estimate.py
"""

import pytest
from command_runs import flat, ran


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
