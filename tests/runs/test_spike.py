"""The loss watchdog finds spikes in time and is silent over sound training.

python -m pytest tests/runs/test_spike.py
"""

import json
import math

import numpy
import pytest
import torch.distributed as dist

import spike_runs
from curry_train.gates.two_ranks import run_on_ranks
from curry_train.runs.policy_config import NUM_BASELINE_LOSSES, SpikeConfig
from curry_train.runs.spike import SpikeWatchdog, line_through


def alarms(losses, **config):
    watchdog = SpikeWatchdog(SpikeConfig(**config))
    return [
        spike
        for step, loss in enumerate(losses, start=1)
        if (spike := watchdog.observe(step, loss))
    ]


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


@pytest.mark.parametrize("shape", HEALTHY)
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_sound_loss_curves_raise_no_false_alarm(shape, noise):
    for seed in range(4 if noise else 1):
        assert alarms(noisy(seed, HEALTHY[shape], noise=noise)) == []


@pytest.mark.parametrize("trainings", [30, pytest.param(100, marks=pytest.mark.long)])
def test_no_false_alarm_over_many_small_trainings_and_every_planted_spike_in_time(trainings):
    """Use trainings that are not too easy: a patience of one raises false alarms."""
    found = spike_runs.measure(trainings, 12)
    assert found["sound"]["false_alarms"]["patience_3"] == 0
    assert found["sound"]["false_alarms"]["patience_1"] > 0
    assert sum(fault["spikes"] for fault in found["planted"].values()) >= 24
    assert [fault["spikes"] - fault["in_time"] for fault in found["planted"].values()] == [0, 0, 0]


@pytest.mark.parametrize("shape", HEALTHY)
@pytest.mark.parametrize("patience", [1, 2, 3, 5])
def test_a_spike_at_any_step_is_found_within_the_patience(shape, patience):
    for seed in range(4):
        random = numpy.random.default_rng(seed)
        losses, at = noisy(seed, HEALTHY[shape], noise=0.05), int(random.integers(100, 380))
        losses[at:] += random.uniform(2, 20)
        spike = alarms(losses[: at + patience], patience=patience)[0]
        assert (spike.first, spike.step) == (at + 1, at + patience)
        assert spike.baseline < spike.limit < spike.loss


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 5, 200])
def test_a_loss_that_is_not_finite_is_found_at_once(value, at):
    losses = noisy(0, HEALTHY["drifts up"])
    losses[at] = value
    spike = alarms(losses)[0]
    assert (spike.first, spike.step) == (at + 1, at + 1)
    assert "not finite" in spike.words


def test_not_finite_after_losses_that_were_too_high_is_one_spike():
    losses = [*noisy(0, numpy.full(100, 2.0)), 9.0, math.nan]
    assert [(spike.first, spike.step) for spike in alarms(losses, patience=5)] == [(101, 102)]


def test_repeated_nan_is_reported_once_and_again_after_sound_losses():
    calm = noisy(0, numpy.full(100, 2.0))
    losses = [*calm, *[math.nan] * 9, *calm[:40], math.inf, math.nan]
    assert [(spike.first, spike.step) for spike in alarms(losses)] == [(101, 101), (150, 150)]
    watchdog, later = SpikeWatchdog(), SpikeWatchdog()
    assert watchdog.observe(1, math.nan) is not None
    later.load_state_dict(watchdog.state_dict())
    assert later.observe(2, math.nan) is None


def test_one_step_less_than_the_patience_is_no_spike_and_does_not_move_the_baseline():
    calm = list(noisy(0, numpy.full(200, 2.0), noise=0.01))
    bursts = [9.0 if step > 80 and step % 4 in (0, 1) else loss for step, loss in enumerate(calm)]
    assert alarms(bursts, patience=3) == []
    assert alarms([*bursts, 2.5, 2.5, 2.5], patience=3)[0].baseline == pytest.approx(2.0, abs=0.02)


def test_a_rise_that_is_small_relative_to_the_level_is_no_spike():
    """Cover a loss that hardly moves: its noise is too small for a robust deviation alone."""
    losses = [*(0.5 + 5 * numpy.exp(-STEPS / 8)), *[0.508] * 20]
    assert alarms(losses) == []
    assert len(alarms(losses, least_rise=0.0)) == 1


def test_a_small_rise_of_a_loss_that_has_hardly_fallen_is_no_spike():
    losses = [*(1000 - STEPS / 40), *[990.5] * 3]
    assert [spike.first for spike in alarms(losses)] == [401]


@pytest.mark.parametrize("first", [5.0, 2000.0, 1e6])
def test_a_rise_is_found_whatever_the_first_losses(first):
    """Cover a regression that starts far above its end: 2% of its fall is 40 times the level."""
    losses = [*(0.1 + first * numpy.exp(-STEPS / 8)), *[1.0] * 3]
    (spike,) = alarms(losses)
    assert (spike.first, spike.baseline) == (401, pytest.approx(0.1))


def test_a_spike_is_reported_once_and_later_losses_are_the_new_baseline():
    losses = [
        *noisy(0, numpy.full(100, 2.0)),
        *noisy(1, numpy.full(100, 6.0)),
        *noisy(2, numpy.full(40, 12.0)),
    ]
    assert [spike.step for spike in alarms(losses)] == [103, 203]


def test_noise_is_measured_around_the_trend_line():
    steps = numpy.arange(64)
    noise = 0.1 * numpy.random.default_rng(0).standard_normal(64)
    assert line_through(list(steps), list(5 - 0.05 * steps)) == pytest.approx((-0.05, 0), abs=1e-12)
    for slope in (0.0, -0.05, 0.3):
        measured = line_through(list(steps), list(slope * steps + noise))
        assert measured == (pytest.approx(slope, abs=0.003), pytest.approx(0.1, rel=0.35))


def test_a_watchdog_restored_from_its_state_behaves_the_same():
    """Save the state after any step, also during a suspected spike, and as JSON."""
    losses = [
        *noisy(0, numpy.full(90, 2.0)),
        7.0,
        7.0,
        *noisy(1, numpy.full(30, 2.0)),
        7.0,
        7.0,
        7.0,
    ]
    whole = [spike.step for spike in alarms(losses)]
    assert whole == [125]
    for cut in (3, 50, 91, 92, 124):
        first = SpikeWatchdog(SpikeConfig())
        for step in range(1, cut + 1):
            first.observe(step, losses[step - 1])
        second = SpikeWatchdog(SpikeConfig())
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert json.dumps(second.state_dict()) == json.dumps(first.state_dict())
        rest = range(cut + 1, len(losses) + 1)
        assert [step for step in rest if second.observe(step, losses[step - 1])] == whole
    # Both forget the same losses.
    for step in range(200):
        first.observe(200 + step, 2.0)
        second.observe(200 + step, 2.0)
    assert len(second.state_dict()["accepted"]) == len(first.state_dict()["accepted"])


def spikes_on_ranks():
    """Give rank 1 alone a high loss: the mean is judged, and both ranks get the same step."""

    watchdog = SpikeWatchdog(SpikeConfig(), group=dist.group.WORLD)
    rank = dist.get_rank()
    spikes = []
    for step in range(1, 61):
        loss = 2.0 + 0.01 * math.sin(step * (rank + 1)) + (5.0 if rank == 1 and step > 50 else 0)
        spike = watchdog.observe(step, loss)
        if spike:
            spikes.append([spike.first, spike.step, spike.loss])
    return spikes


def test_ranks_judge_the_mean_of_their_losses_alike():
    first, second = run_on_ranks("test_spike:spikes_on_ranks")
    assert first == second
    assert [(begun, step) for begun, step, _ in first] == [(51, 53)]
    assert first[0][2] == pytest.approx(4.5, abs=0.02)


def test_the_mean_is_that_of_the_group_and_not_of_all_ranks(pair_of_four_ranks):
    watchdog = SpikeWatchdog(SpikeConfig(), group=pair_of_four_ranks)
    for step in range(1, NUM_BASELINE_LOSSES + 1):
        watchdog.observe(step, 2.0)
    assert watchdog.state_dict()["began"] == 2.0


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"action": "off"}, "spike.action must be none, warn or rollback; got 'off'"),
        ({"window": 4}, "spike.window must be a whole number from 16; got 4"),
        ({"threshold": 0}, "spike.threshold must be above 0; got 0"),
        ({"patience": 0}, "spike.patience must be a whole number from 1; got 0"),
        ({"least_rise": 1.5}, "spike.least_rise must be from 0 to below 1; got 1.5"),
        ({"skip_around": -1}, "spike.skip_around must be a whole number from 0; got -1"),
        ({"lower_rate": 2.0}, "spike.lower_rate must be between 0 and 1, or null; got 2.0"),
        ({"attempts": True}, "spike.attempts must be a whole number from 1; got True"),
        ({"patiense": 3}, "spike.patiense is no key; did you mean spike.patience?"),
    ],
)
def test_wrong_settings_are_named(block, words):
    with pytest.raises(ValueError, match="^" + words.replace(".", r"\.")):
        SpikeConfig.from_config(block)


def test_high_losses_far_apart_do_not_count_as_consecutive():
    """Continue long without a watchdog, and then with one again."""
    watchdog = SpikeWatchdog(SpikeConfig(window=32, patience=3))
    for step in range(1, 101):
        watchdog.observe(step, 2.0 + 0.01 * (step % 7))
    assert [watchdog.observe(step, 9.0) for step in (101, 102)] == [None, None]
    last = SpikeWatchdog(watchdog.config)
    last.load_state_dict(watchdog.state_dict())
    assert last.observe(102 + 32, 9.0).first == 101
    assert watchdog.observe(500, 9.0) is None
    assert watchdog.suspects == 1


def test_a_fall_is_measured_from_the_first_level():
    watchdog = SpikeWatchdog(SpikeConfig())
    for step in range(1, 41):
        expected = None if step <= NUM_BASELINE_LOSSES else 91.5  # the median of 99 to 84
        assert watchdog.state_dict()["began"] == expected
        watchdog.observe(step, 100.0 - step)
