"""The policy keeps what a simple model keeps over random histories; wrong rules are caught.

python -m pytest tests/benchmarks/test_torture_retention.py
"""

import dataclasses

import pytest

from curry_train.runs import retention, store
from curry_train.runs.policy_config import PolicyConfig, Retention
from torture_retention import KINDS_OF_EVENT, histories, run_history, with_rules

BRANCH = store.Store.branch


def test_the_rules_agree_with_the_simple_model_on_some_hundred_histories():
    """Run some hundred random histories; the recorded run has ten thousand."""
    found = histories(300)
    assert found["wrong"] == []
    assert found["histories"] == 300
    assert min(found[name] for name in KINDS_OF_EVENT) >= 150


def by_text(every, config, **_):
    names = sorted((one for one in every if one.kind != "best-k"), key=lambda one: str(one.step))
    return names[: -config.retention.rollback_keep]


def keeps_one_more(every, config, **options):
    keep = Retention(config.retention.rollback_keep + 1, config.retention.recovery_keep)
    return retention.to_delete(every, dataclasses.replace(config, retention=keep), **options)


def keeps_one_less(every, config, **options):
    gone, line = retention.to_delete(every, config, **options), retention.newest_first(every)
    left = [one for one in line if one not in gone]
    return [*gone, *(left[-1:] if len(left) > 1 else [])]


def deletes_the_best(every, config, **options):
    gone, best = retention.to_delete(every, config, **options), retention.best_first(every, config)
    return [*gone, *(one for one in best[:1] if len(best) > config.best_k > 0 and one not in gone)]


def branches_later(store, step, *, at_once=False):
    """Give nothing up before the new line has saved a state."""
    return BRANCH(store, step)


def gives_up_nothing(branches, states):
    return []


WRONG = {
    "text order": dict(to_delete=by_text),
    "one too many": dict(to_delete=keeps_one_more),
    "one too few": dict(to_delete=keeps_one_less),
    "the best": dict(to_delete=deletes_the_best),
    "NaN is saved": dict(what_is_wrong=lambda *_, **__: None),
}


WRONG_LINES = {
    "nothing is given up": (store, "branches_in_force", gives_up_nothing),
    "given up too late": (store.Store, "branch", branches_later),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_lineage_is_caught(name, monkeypatch):
    monkeypatch.setattr(*WRONG_LINES[name])
    found = histories(600, shorten=False)
    assert found["wrong"] != [], f"not in {found['histories']} histories"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name):
    with with_rules(**WRONG[name]):
        found = histories(600, shorten=False)
    assert found["wrong"] != [], f"not in {found['histories']} histories"


def test_a_damaged_state_that_is_saved_again_counts_as_intact():
    """Check that the older one may then be deleted."""
    config = PolicyConfig(rollback_every=1, recovery_every=5, best_k=0, retention=Retention(1, 1))
    sound = [("train", (number, None, True)) for number in (1, 4)]
    run_history(
        config, [*sound, ("rot", 1), ("train", (2, None, True)), ("crash", (5, (2, None, True)))]
    )
