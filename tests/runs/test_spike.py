"""The loss watchdog finds spikes in time and is silent over sound training.

python -m pytest tests/runs/test_spike.py
"""

import json
import math

import numpy
import pytest

import spike_runs
from curry_train.runs import SpikeConfig, SpikeWatchdog
from spike_runs import alarms


def noisy(seed, shape, *, noise=0.1):
    return shape + noise * numpy.random.default_rng(seed).standard_normal(len(shape))


STEPS = numpy.arange(400)
HEALTHY = {
    "falls and flattens": 8 * numpy.exp(-STEPS / 40) + 2,
    "falls along a line, then stops": numpy.maximum(8 - STEPS / 20, 2.0),
    "a step down": numpy.where(STEPS < 200, 4.0, 2.0),
    "drifts up": 2 + STEPS / 400,
    "below nothing, as a log-density": -3 - 2 * (1 - numpy.exp(-STEPS / 60)),
    "up in a warm-up, then down": 4
    + numpy.where(STEPS < 60, STEPS / 60, numpy.exp(-(STEPS - 60) / 80)),
    "waves": 3 + 0.3 * numpy.sin(STEPS / 15),
}


def test_no_false_alarm_over_many_small_trainings_and_every_planted_spike_in_time():
    """Use trainings that are not too easy: a patience of one raises false alarms."""
    found = spike_runs.measure(100, 12)
    assert found["sound"]["false_alarms"]["patience_3"] == 0
    assert found["sound"]["false_alarms"]["patience_1"] > 0
    assert sum(fault["spikes"] for fault in found["planted"].values()) >= 24
    assert [fault["spikes"] - fault["in_time"] for fault in found["planted"].values()] == [0, 0, 0]


@pytest.mark.parametrize("shape", HEALTHY)
@pytest.mark.parametrize("patience", [1, 3])
def test_a_spike_at_any_step_is_found_once_within_the_patience(shape, patience):
    """Find nothing in the sound losses before, nor in those after it, which are a new baseline."""
    for seed in range(2):
        random = numpy.random.default_rng(seed)
        losses, at = noisy(seed, HEALTHY[shape], noise=0.05 * seed), int(random.integers(100, 360))
        losses[at:] += random.uniform(2, 20)
        (spike,) = alarms(losses, patience=patience)
        assert (spike.first, spike.step) == (at + 1, at + patience)
        assert spike.baseline < spike.limit < spike.loss


def test_repeated_nan_is_reported_once_and_again_after_sound_losses():
    calm = noisy(0, numpy.full(100, 2.0))
    losses = [*calm, *[math.nan] * 9, *calm[:40], math.inf, math.nan]
    assert [(spike.first, spike.step) for spike in alarms(losses)] == [(101, 101), (150, 150)]
    watchdog, later = SpikeWatchdog(), SpikeWatchdog()
    assert watchdog.observe(1, math.nan) is not None
    later.load_state_dict(watchdog.state_dict())
    assert later.observe(2, math.nan) is None


def test_a_watchdog_restored_from_its_state_behaves_the_same():
    """Restore before every step, also during a suspected spike, a state that was JSON."""
    calm = [noisy(seed, numpy.full(length, 2.0)) for seed, length in ((0, 90), (1, 30))]
    whole = SpikeWatchdog()
    found = []
    for step, loss in enumerate([*calm[0], 7.0, 7.0, *calm[1], 7.0, 7.0, 7.0], 1):
        restored = SpikeWatchdog()
        restored.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        spike = whole.observe(step, loss)
        assert restored.observe(step, loss) == spike
        assert restored.state_dict() == whole.state_dict()
        found += [step] if spike else []
    assert found == [125]


LINE = numpy.arange(49) / 10


# The level of the last 16 losses, and the limit: with 6 standard deviations of the noise, or with
# 2% of the fall or of the level. A rise may go on for 16 steps; here each second has a loss.
@pytest.mark.parametrize(
    ("losses", "level", "limit"),
    [
        ([2.0] * 15, None, None),
        ([2.0] * 15 + [1.0], 2.0, 2.0),
        ([1.9, 2.1] * 8, 2.0, 2.0 + 6 * 0.14826),
        (LINE[:16], 0.75, 0.75 + 0.8),
        (10 - LINE, 5.95, 5.95 + 0.02 * (9.25 - 5.95)),
        ([3.0] * 16 + [2.0] * 32, 2.0, 2.02),
        ([1.0] * 16 + [-3.0] * 32, -3.0, -3.0 + 0.02 * 3.0),
    ],
)
def test_the_limit_is_that_of_a_count_by_hand(losses, level, limit):
    watchdog = SpikeWatchdog(SpikeConfig(window=32))
    for step, loss in enumerate(losses):
        assert watchdog.observe(2 * step, loss) is None
    assert watchdog.limit() == ((None, None) if level is None else pytest.approx((level, limit)))
