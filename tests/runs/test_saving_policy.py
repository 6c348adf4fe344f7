"""Save, keep and remove checkpoints on a real store, as the policy decides.

python -m pytest tests/runs/test_saving_policy.py
"""

import contextlib

import pytest
import torch

from curry_train.runs import (
    BackgroundSaver,
    PolicyConfig,
    Retention,
    SavedRun,
    SavingPolicy,
    Store,
    load_chosen,
)

from ..store_models import new_state, newest_step, train

OFTEN = PolicyConfig(rollback_every=2, recovery_every=6, best_k=2, retention=Retention(3, 2))


def steps(run, kind):
    return [one.step for one in SavedRun(run).committed(kind)]


def train_on(policy, state, until, *, dev=None):
    """Train to a step; `dev` are the dev losses reported for steps."""
    saved = []
    while state.step < until:
        metrics = {"loss": train(state, 1)[0]}
        if dev and state.step in dev:
            metrics["dev_loss"] = dev[state.step]
        saved += policy.after_step(state.step, state, metrics)
    return saved


def test_cadences_retention_and_what_after_step_returns(store, tmp_path):
    saved = train_on(SavingPolicy(store, OFTEN), new_state(), 20)
    assert [(one.kind, one.step) for one in saved[:4]] == [
        ("rollback", 2),
        ("rollback", 4),
        ("recovery", 6),
        ("rollback", 8),
    ]
    assert steps(tmp_path, "rollback") == [16, 20]
    assert steps(tmp_path, "recovery") == [12, 18]
    assert newest_step(tmp_path) == 20


def test_turning_back_gives_up_later_checkpoints(store, tmp_path):
    state = new_state()
    policy = SavingPolicy(store, OFTEN)
    train_on(policy, state, 20, dev={19: 0.1})
    assert policy.resume(state, "before-17").saved.step == state.step == 16
    assert newest_step(tmp_path) == 16
    train_on(policy, state, 20)
    assert newest_step(tmp_path) == 20
    policy.resume(state, "before-19")
    assert steps(tmp_path, "rollback")[-1] == 16
    assert newest_step(tmp_path) == 18
    train_on(policy, state, 20)
    assert steps(tmp_path, "best-k") == [19]


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("in_background", [False, True])
def test_a_new_line_keeps_the_old_one_until_it_has_saved_a_state(tmp_path, in_background):
    """Resume at 6 of 10, and stop before, in the middle of and after the first save."""
    with Store(tmp_path) as store:
        train_on(SavingPolicy(store, OFTEN), new_state(), 10)
    names = [f"rollback/step-{step:08d}.dcp" for step in (8, 10)]
    before = [*map(SavedRun(tmp_path).verify, names)]

    @contextlib.contextmanager
    def resumed(number):
        with Store(tmp_path) as store:
            saver = BackgroundSaver(store) if in_background else None
            policy = SavingPolicy(store, OFTEN, saver=saver)
            state = new_state(1)
            assert policy.resume(state, number).saved.step == number
            yield store, policy, state

    with resumed(6) as (_, policy, state):
        train_on(policy, state, 7, dev={7: 0.1})
        policy.finish()
    assert steps(tmp_path, "best-k") == [7]

    with resumed(6) as (store, policy, state), contextlib.suppress(KeyboardInterrupt):
        store.begin = interrupt
        train_on(policy, state, 8)
    assert load_chosen(tmp_path, new_state(1)).saved.step == 10
    assert [*map(SavedRun(tmp_path).verify, names)] == before

    with resumed(6) as (store, policy, state), contextlib.suppress(KeyboardInterrupt):
        store.discard = interrupt
        with torch.no_grad():
            state.model[0].weight.add_(1)
        train_on(policy, state, 8)
        policy.finish()
    assert load_chosen(tmp_path, new_state(1)).saved.step == 8
    assert SavedRun(tmp_path).verify(names[0]) != before[0]

    with resumed(8) as (_, policy, state):
        train_on(policy, state, 12)
        policy.finish()
    assert steps(tmp_path, "rollback") == [8, 10]
    assert newest_step(tmp_path) == 12


def test_the_last_step_is_saved_once(tmp_path):
    state = new_state()
    with Store(tmp_path) as store:
        policy = SavingPolicy(store, OFTEN)
        train_on(policy, state, 7)
        assert [(one.kind, one.step) for one in policy.save_now(7, state)] == [("recovery", 7)]
        assert policy.save_now(7, state) == []
