"""The learning rate of every step. `python -m pytest tests/trainer/test_schedule.py`."""

import math

import pytest

from curry_train.config import LearningRateSchedule


def test_cosine_has_its_value_at_each_turn():
    factor = LearningRateSchedule(steps=101, warmup_steps=0, least=0.0)
    assert factor(0) == 1.0
    assert factor(50) == pytest.approx(0.5)
    assert factor(25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert factor(100) == 0.0


def test_warm_up_rises_in_a_line_to_the_peak_and_the_last_step_has_the_least():
    factor = LearningRateSchedule(steps=100, warmup_steps=10, least=0.1)
    assert [factor(step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert factor(10) == 1.0
    assert factor(99) == pytest.approx(0.1)
    assert factor(10_000) == pytest.approx(0.1)


def test_linear_and_constant_schedules():
    assert [LearningRateSchedule(5, least=0.5, shape="linear")(step) for step in range(6)] == [
        1.0,
        0.875,
        0.75,
        0.625,
        0.5,
        0.5,
    ]
    assert [LearningRateSchedule(5, 2, shape="constant")(step) for step in range(4)] == [
        0.5,
        1.0,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 11}, "warmup_steps must be from 0 to the 10 steps of the run; got 11"),
        ({"least": 1.5}, "least must be from 0 to 1"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LearningRateSchedule(10, **options)
