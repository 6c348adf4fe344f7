"""When a save is due: by steps, by a bound on overhead, by Young and Daly. `python -m pytest tests/test_cadence.py`."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curry_train.runs.cadence import FIRST, CadenceFromOverhead, due, steps_between, young_daly
from curry_train.runs.policy_config import PolicyConfig


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, ()), (1, ()), (100, ("rollback",)), (999, ()), (1000, ("rollback", "recovery")), (1100, ("rollback",))],
)
def test_kinds_are_due_at_multiples(step, expected):
    assert due(step, PolicyConfig()) == expected


def test_what_is_null_is_never_due_and_auto_is_asked():
    never = PolicyConfig(rollback_every=None, recovery_every=None)
    assert all(due(step, never) == () for step in range(2001))
    automatic = PolicyConfig(rollback_every="auto", recovery_every=7)
    assert due(14, automatic, automatic=True) == ("rollback", "recovery")
    assert due(14, automatic) == ("recovery",)
    assert due(15, automatic, automatic=True) == ("rollback",)


def test_young_daly_against_figures_worked_by_hand():
    # d = 60 s, M = 86,400 s: sqrt(2 d M) = 3219.94; d / 2M = 3.4722e-4, its root 0.0186339, a third of it 0.0062113
    assert young_daly(60, 86_400) == pytest.approx(3219.94 * (1 + 0.0062113 + 0.0000386) - 60, abs=0.1)
    assert young_daly(300, 100) == 100  # a save longer than twice the time between failures


@given(st.floats(0.01, 1000), st.floats(1, 1e6))
def test_young_daly_is_near_the_least_loss(save, between):
    """Daly's model of the whole time: M e^(r/M) (e^((t + d)/M) - 1) / t, with r not depending on t."""
    if save > between / 10:
        return

    def lost(interval):
        return math.expm1((interval + save) / between) / interval

    best = young_daly(save, between)
    assert lost(best) <= min(lost(best * factor) for factor in (0.5, 0.8, 1.25, 2.0))


@pytest.mark.parametrize("wrong", [(0, 5), (-1, 5), (1, 0), (1, math.inf), (math.nan, 5)])
def test_times_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="must be above 0"):
        young_daly(*wrong)


def test_fewest_steps_within_the_bound():
    assert steps_between(3.5, 1.0, 0.035) == 100
    assert steps_between(3.51, 1.0, 0.035) == 101
    assert steps_between(0.0, 1.0, 0.035) == 1
    with pytest.raises(ValueError, match="overhead above 0"):
        steps_between(1, 1, 0)


def run(cadence, steps, *, step_seconds, save_seconds, recovery_every=None, seed=0):
    """(steps of saves, seconds of saves, seconds of steps) of a run that follows a cadence."""
    generator, saves, saving, stepping = random.Random(seed), [], 0.0, 0.0
    following = cadence.steps_to_next()
    for step in range(1, steps + 1):
        seconds = step_seconds * generator.uniform(0.7, 1.3)
        stepping += seconds
        cadence.stepped(seconds)
        if step >= following or (recovery_every and step % recovery_every == 0):
            cost = save_seconds * generator.uniform(0.7, 1.3)
            saving += cost
            cadence.waited(cost, save=True)
            saves.append(step)
            following = step + cadence.steps_to_next()
    return saves, saving, stepping


def test_first_save_measures_and_then_the_bound_holds():
    saves, saving, stepping = run(CadenceFromOverhead(0.035), 5000, step_seconds=0.2, save_seconds=1.4)
    assert saves[0] == FIRST
    assert saving / stepping < 0.037
    assert saving / stepping > 0.030  # not fewer saves than allowed


def test_other_saves_count_against_the_bound():
    saves, saving, stepping = run(
        CadenceFromOverhead(0.035), 5000, step_seconds=0.2, save_seconds=1.4, recovery_every=500
    )
    assert set(range(500, 5001, 500)) <= set(saves)
    assert saving / stepping < 0.038


def test_rare_failures_make_saves_rarer_but_never_break_the_bound():
    saves, *_ = run(
        CadenceFromOverhead(0.035, mean_time_between_failures=86_400), 20_000, step_seconds=1.0, save_seconds=10.0
    )
    gaps = [after - before for before, after in itertools.pairwise(saves[1:])]
    assert 1250 < sum(gaps) / len(gaps) < 1370  # young_daly(10, 86400) = 1310, over 286 for the bound
    saves, saving, stepping = run(
        CadenceFromOverhead(0.035, mean_time_between_failures=60), 20_000, step_seconds=1.0, save_seconds=10.0
    )
    assert saving / stepping < 0.037  # failures every minute ask for more than the bound allows
