"""Check retention over random histories of saves, rollbacks, damage and NaN.

    python -m pytest tests/runs/test_retention.py

The ledger in retention_ledger.py is an independent model; it catches each of several wrong rules.
"""

import math
import random
from dataclasses import replace

import pytest
from retention_ledger import Rules, broken_promise, random_history
from retention_ledger import new_saved as saved

from curry_train.runs.policy_config import PolicyConfig, Retention
from curry_train.runs.retention import best_first, is_among_best, newest_first, to_delete


def test_the_newest_checkpoints_by_number_are_kept():
    """Compare numbers: as text, step 999999990 sorts before step 99999999."""
    steps = [99_999_970, 99_999_980, 99_999_990, 100_000_000, 100_000_010]
    every = [saved("rollback", step) for step in steps]
    config = PolicyConfig(retention=Retention(rollback_keep=2))
    assert [one.step for one in to_delete(every, config, step=steps[-1])] == steps[:3]


def test_a_recovery_counts_as_a_rollback_and_outlives_it():
    every = [
        saved("recovery" if step % 1000 == 0 else "rollback", step)
        for step in range(100, 4001, 100)
    ]
    gone = to_delete(every, PolicyConfig(), step=4000)
    assert [one.step for one in every if one not in gone] == [
        2000,
        3000,
        3600,
        3700,
        3800,
        3900,
        4000,
    ]


def test_states_beyond_the_current_step_are_deleted_once_an_earlier_one_exists():
    every = [saved("rollback", step) for step in (100, 200, 300, 400)]
    config = PolicyConfig(retention=Retention(rollback_keep=1))
    assert [one.step for one in to_delete(every, config, step=210)] == [100, 300, 400]
    assert to_delete(every[2:], config, step=210) == []


def test_damaged_checkpoints_do_not_count_and_are_deleted_when_superseded():
    every = [saved("rollback", step) for step in (100, 200, 300, 400)]
    config = PolicyConfig(retention=Retention(rollback_keep=2))
    damaged = {every[3].folder, every[1].folder}
    assert [one.step for one in to_delete(every, config, step=400, damaged=damaged)] == [200]


def test_a_checkpoint_that_is_being_read_is_not_deleted():
    every = [saved("rollback", step) for step in range(100, 1001, 100)]
    gone = to_delete(every, PolicyConfig(), step=1000, protected={every[0].folder})
    assert [one.step for one in gone] == [200, 300, 400, 500]


def test_best_by_metric_and_direction_and_ties_go_to_the_earlier():
    every = [
        saved("best-k", step, value)
        for step, value in ((1, 0.5), (2, 0.25), (3, 0.5), (4, 1e-5), (5, 30.0))
    ]
    assert [one.step for one in best_first(every, PolicyConfig())] == [4, 2, 1, 3, 5]
    up = PolicyConfig(best_k_direction="maximize")
    assert [one.step for one in best_first(every, up)] == [5, 1, 3, 2, 4]
    assert [one.step for one in to_delete(every, PolicyConfig(), step=5)] == [3, 5]
    other = [*every, saved("best-k", 6, 9.0, name="accuracy")]
    assert [one.step for one in to_delete(other, PolicyConfig(), step=6)] == [3, 5]


def test_turning_best_k_off_deletes_nothing():
    assert to_delete([saved("best-k", 1, 0.5)], PolicyConfig(best_k=0), step=9) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_nan_is_never_among_the_best(value, direction):
    assert not is_among_best(value, 1, [], PolicyConfig(best_k_direction=direction))


def test_a_tie_with_the_worst_of_k_is_not_among_the_best():
    every = [saved("best-k", step, 0.5) for step in (1, 2, 3)]
    assert not is_among_best(0.5, 4, every, PolicyConfig())
    assert is_among_best(0.49, 4, every, PolicyConfig())
    assert is_among_best(0.5, 4, every[:2], PolicyConfig())


def test_rollbacks_of_parameters_go_by_step():
    every = [saved("best-k", step, float(step), name="rollback") for step in (9, 10, 11, 100, 8)]
    config = PolicyConfig(rollback_parameters_only=True, retention=Retention(rollback_keep=2))
    assert [one.step for one in to_delete(every, config, step=11)] == [9, 100, 8]


# Random histories


def test_no_random_history_breaks_a_rule_of_retention():
    for seed in range(400):
        history, config = random_history(random.Random(seed))
        assert broken_promise(history, config, Rules()) is None, seed


def test_deleting_twice_deletes_nothing_more():
    for seed in range(100):
        history, config = random_history(random.Random(seed))
        kinds = [kind for kind, _ in history if kind in ("rollback", "recovery")]
        there = [saved(kind, number) for number, kind in enumerate(kinds)]
        first = to_delete(there, config, step=seed)
        left = [one for one in there if one not in first]
        assert to_delete(left, config, step=seed) == []
        assert len(left) + len(first) == len(there)


def test_checkpoints_at_multiples_of_keep_every_are_never_deleted():
    config = PolicyConfig(retention=Retention(rollback_keep=2, recovery_keep=1, keep_every=100))
    there = [
        saved("recovery" if step in (120, 200) else "rollback", step) for step in range(80, 281, 20)
    ]
    there.append(saved("rollback", 200))  # the same state once more
    gone = to_delete(there, config, step=280)
    assert sorted((one.step, one.kind) for one in there if one not in gone) == [
        (100, "rollback"), (200, "recovery"), (260, "rollback"), (280, "rollback"),
    ]  # fmt: skip


# Rules that are known to be wrong


def by_text(every, config, *, step, damaged=(), protected=()):
    """Keep the last names by text."""
    names = sorted(newest_first(every), key=lambda one: str(one.step))
    return [one for one in names[: -config.retention.rollback_keep] if one.folder not in protected]


def stale_counts(every, config, *, step, damaged=(), protected=()):
    """Keep the highest steps, also those given up by a rollback."""
    return to_delete(every, config, step=10**9, damaged=damaged, protected=protected)


def damage_counts(every, config, *, step, damaged=(), protected=()):
    return to_delete(every, config, step=step, protected=protected)


def reading_is_no_matter(every, config, *, step, damaged=(), protected=()):
    return to_delete(every, config, step=step, damaged=damaged)


def newest_of_the_best(every, config, *, step, damaged=(), protected=()):
    ranked = sorted(best_first(every, config), key=lambda one: -one.step)
    gone = to_delete(every, config, step=step, damaged=damaged, protected=protected)
    return [one for one in gone if one.kind != "best-k"] + ranked[config.best_k :]


def forgets_what_lasts(every, config, *, step, damaged=(), protected=()):
    config = replace(config, retention=replace(config.retention, keep_every=None))
    return to_delete(every, config, step=step, damaged=damaged, protected=protected)


def nan_is_best(value, step, every, config):
    """Accept NaN as best, because `value >= worst` is False for NaN."""
    ranked = best_first(every, config)
    return config.best_k > 0 and (
        len(ranked) < config.best_k or not value >= ranked[-1].metric.value
    )


def nothing(every, config, **_):
    return []


WRONG = [
    (Rules(delete=by_text), "the newest good state is gone"),
    (Rules(delete=stale_counts), "a stale higher step stays"),
    (Rules(delete=damage_counts), "fewer good states stay than possible"),
    (Rules(delete=reading_is_no_matter), "a checkpoint that is being read is gone"),
    (Rules(delete=newest_of_the_best), "one of the best is gone"),
    (Rules(delete=nothing), "too many states stay"),
    (Rules(delete=nothing), "too many of the best stay"),
    (Rules(delete=forgets_what_lasts), "a state kept by keep_every is gone"),
    (Rules(among_best=nan_is_best), "a NaN or infinite metric is among the best"),
    (Rules(saves=lambda healthy: True), "the newest good state is gone"),
]


@pytest.mark.parametrize(("rules", "message"), WRONG)
def test_rules_that_are_known_to_be_wrong_are_caught(rules, message):
    found = set()
    for seed in range(2000):
        found.add(broken_promise(*random_history(random.Random(seed)), rules))
        if message in found:
            return
    pytest.fail(f"{message} was never found, but {found}")
