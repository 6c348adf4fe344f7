"""A timing on a machine that drifts and stalls, which are planted.

python -m pytest tests/bench/test_machine.py
"""

import pytest
from planted_machine import DRIFT, PlantedMachine

from curry_train.core.timing import paired_ratio, spread_of, time_in_turns


def test_twice_the_work_takes_2_times_as_long_on_a_machine_that_drifts_and_stalls():
    machine = PlantedMachine(steps=3 * 15, cold_steps=3 * 3)
    ways = [lambda amount=amount: machine.launch(amount) for amount in (1.0, 2.0)]
    once, double = time_in_turns(ways, rounds=12, warmup=3, clock=machine.clock, wait=machine.wait)
    assert max(once + double) > 50  # a stall
    assert paired_ratio(double, once).median == pytest.approx(2, abs=2 * DRIFT / 15)
    assert spread_of(once).upper / spread_of(once).lower - 1 < DRIFT
