"""Check which checkpoints retention deletes; random histories run in tests/benchmarks.

python -m pytest tests/runs/test_retention.py
"""

from curry_train.runs import PolicyConfig, Retention
from curry_train.runs.layout import SavedCheckpoint
from curry_train.runs.retention import is_among_best, to_delete


def saved(kind, step, value=None, *, name="dev_loss"):
    """Make the record of a checkpoint that exists on no disk."""
    return SavedCheckpoint(kind, step, {}, None if value is None else (name, value))


def test_a_value_is_among_the_best_before_later_equals():
    config = PolicyConfig(best_k=2)
    there = [saved("best-k", 2 * at, kept) for at, kept in enumerate((0.5, 0.4, 0.4, 0.2))]
    there += [saved("best-k", 1, 0.0, name="other"), saved("rollback", 2)]
    assert is_among_best(0.4, 1, there, config)
    assert not is_among_best(0.4, 9, there, config)
    assert [one.step for one in to_delete(there, config)] == [0, 4]


def test_turning_best_k_off_deletes_nothing():
    assert to_delete([saved("best-k", 1, 0.5)], PolicyConfig(best_k=0)) == []


def test_checkpoints_at_multiples_of_keep_every_are_never_deleted():
    config = PolicyConfig(retention=Retention(rollback_keep=2, recovery_keep=1, keep_every=100))
    there = [
        saved("recovery" if step in (120, 200) else "rollback", step) for step in range(80, 281, 20)
    ]
    gone = to_delete(there, config)
    assert sorted((one.step, one.kind) for one in there if one not in gone) == [
        (100, "rollback"), (200, "recovery"), (260, "rollback"), (280, "rollback"),
    ]  # fmt: skip
