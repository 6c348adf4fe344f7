"""Errors in the block `checkpoint:` name the wrong key or value, and the right one.

python -m pytest tests/runs/test_policy_config.py
"""

import re

import pytest
import yaml

from curry_train.runs.policy_config import PolicyConfig, Retention, read_fields

BLOCK = """
checkpoint: {rollback_every: 100, recovery_every: 1000, best_k: 3, best_k_metric: dev_loss,
             best_k_direction: minimize, retention: {rollback_keep: 5, recovery_keep: 3}}
"""


def test_the_documented_block_is_the_default():
    assert read_fields(PolicyConfig, yaml.safe_load(BLOCK)["checkpoint"]) == PolicyConfig()
    assert PolicyConfig().retention == Retention(5, 3)
    assert PolicyConfig().overhead == 0.035


MISTAKES = """
rollback_evry: 5            | checkpoint.rollback_evry is no key; did you mean 'rollback_every'?
rollback_every: 0           | checkpoint.rollback_every must be 1 or more, or null for none; got 0
rollback_every: true        | checkpoint.rollback_every must be
overhead: 0                 | checkpoint.overhead must be above 0, at most 1; got 0
recovery_every: auto        | checkpoint.recovery_every must be a whole number or null
best_k_metric: dev loss     | letters, digits and _, such as dev_loss
best_k_direction: min       | checkpoint.best_k_direction must be minimize or maximize; got 'min'
retention: 5                | checkpoint.retention must be a block of keys, got 5
retention: {keep_every: 0}  | checkpoint.retention.keep_every must be 1 or more, or null for none
"""


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_wrong_keys_and_values_are_named_with_the_right_ones(row):
    block, _, message = row.partition("|")
    with pytest.raises(ValueError, match=re.escape(message.strip())):
        read_fields(PolicyConfig, yaml.safe_load(block), inside="checkpoint")
