"""Estimated bytes on the disk equal known figures.

python -m pytest tests/runs/test_disk_estimate.py
"""

import pytest
from click.testing import CliRunner

from curry_train.cli.main import main
from curry_train.runs.retention import BYTES_PER_GB, estimate_disk

SEVEN = 7 * 10**9


def test_7b_keeps_756_gb_and_not_924_because_best_k_is_parameters_only():
    found = estimate_disk(SEVEN)
    assert found.checkpoint == 84 * BYTES_PER_GB
    assert found.best == 28 * BYTES_PER_GB
    assert found.kept == {
        "rollback": 420 * BYTES_PER_GB,
        "recovery": 252 * BYTES_PER_GB,
        "best-k": 84 * BYTES_PER_GB,
    }
    assert found.total == 756 * BYTES_PER_GB
    assert found.in_flight == 84 * BYTES_PER_GB
    assert found.most == 840 * BYTES_PER_GB
    names = "checkpoint", "best", "kept", "total", "in_flight", "advice", "most"
    facts = {name: getattr(found, name) for name in names}
    assert found.to_json() == {"parameters": SEVEN, "dtype": "float32", **facts}


def test_above_10_gb_a_save_in_the_background_is_proposed():
    assert estimate_disk(833_000_000).advice == ()
    assert "84.0 GB, more than 10 GB" in " ".join(estimate_disk(SEVEN).advice)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        estimate_disk(1, dtype="fp32")
    with pytest.raises(ValueError, match="parameters must be 1 or more"):
        estimate_disk(0)


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
            "checkpoint.retention must be a block such as {rollback_keep: 5",
        ),
        (["rollback_every.x=1"], "rollback_every"),
        (["rollback_every=1", "rollback_every.x=1"], "rollback_every is 1"),
    ],
)
def test_words_that_set_nothing_sensible_end_in_one_line(words, message):
    ended = CliRunner().invoke(main, ["runs", "estimate", "--parameters", "7e9", *words])
    assert isinstance(ended.exception, SystemExit)
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())
