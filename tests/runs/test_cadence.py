"""When a save is due: by steps, by a bound on overhead.

python -m pytest tests/runs/test_cadence.py
"""

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from curry_train.runs import PolicyConfig, SavingPolicy
from curry_train.runs.policy import FIRST_SAVE_STEPS, SAVE_MARGIN_FACTOR, Cadence

from ..store_models import new_state


@settings(deadline=None)  # a slow machine is not a failure
@given(
    step=st.floats(1e-3, 60),
    save=st.floats(1e-3, 600),
    late=st.floats(0, 600),
    overhead=st.floats(0.005, 1),
    spread=st.floats(0, 0.9),
    seed=st.integers(0, 9),
)
def test_the_bound_holds_after_every_save_but_the_first(step, save, late, overhead, spread, seed):
    """Check steps of any length, with saves that take at most the expected time.

    The step after a save in the background waits for its copy; this is charged to the save, or
    each would seem cheap.
    """
    cadence = Cadence(PolicyConfig("auto", overhead=overhead))
    saves = []
    saving = 0.0
    stepping = 0.0
    stalled = 0.0
    generator = random.Random(seed)
    for number in range(400):
        seconds = step * generator.uniform(1 - spread, 1 + spread)
        stepping += seconds
        saving += stalled
        cadence.stepped(seconds, stalled=stalled)
        stalled = 0.0
        if cadence.steps_to_next() == 0:
            saving += save
            cadence.waited(save, save=True)
            stalled = late
            saves.append(number)
        assert len(saves) <= 1 or saving <= overhead * stepping * (1 + 1e-9)
    assert saves[0] == FIRST_SAVE_STEPS - 1
    of_one_step = overhead * step * (1 + spread)
    if of_one_step < save:  # not rarer than allowed: one more save would exceed the bound
        # What the steps before the first save have earned may stay unused.
        unused = SAVE_MARGIN_FACTOR * (save + late) + (1 + FIRST_SAVE_STEPS) * of_one_step
        assert saving + unused > overhead * stepping * (1 - 1e-9)


def test_an_automatic_cadence_decides_again_after_the_steps_that_it_has_counted(monkeypatch):
    """Their numbers do not count, because a run may go back."""
    asked = []
    decide = Cadence.steps_to_next
    monkeypatch.setattr(Cadence, "steps_to_next", lambda self: asked.append(1) or decide(self))
    cadence = Cadence(PolicyConfig("auto", overhead=0.1))
    saves = []
    for step in range(1, 101):
        cadence.stepped(1.0)
        if cadence.is_due():
            cadence.waited(2.0, save=True)
            saves.append(step)
    assert saves == [8, 60, 80, 100]
    assert len(asked) < 15


def test_a_cadence_that_costs_more_than_the_bound_is_named_once_with_a_better_one(store, caplog):
    state = new_state()
    policy = SavingPolicy(store, PolicyConfig(rollback_every=1, recovery_every=None, overhead=0.01))
    for step in range(1, 12):
        state.step = step
        policy.after_step(step, state, {"loss": 1.0})
    (message,) = [one for one in caplog.messages if "rollback_every" in one]
    assert re.search(
        r"saves have taken \d+% of the time of the steps, and overhead allows 1.00%", message
    )
    assert int(re.search(r"rollback_every=(\d+)", message)[1]) > 1
