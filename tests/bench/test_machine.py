"""Disturbances of a timing: other processes and drift, all planted.

python -m pytest tests/bench/test_machine.py
"""

import os

import pytest
from planted_machine import DRIFT, PlantedMachine

from curry_train.bench.report import drift_of, load_notes
from curry_train.core.timing import paired_ratio, spread_of, time_in_turns


def test_twice_the_work_takes_2_times_as_long_on_a_machine_that_drifts_and_stalls():
    machine = PlantedMachine(steps=3 * 15, cold_steps=3 * 3)
    ways = [lambda amount=amount: machine.launch(amount) for amount in (1.0, 2.0)]
    once, double = time_in_turns(ways, rounds=12, warmup=3, clock=machine.clock, wait=machine.wait)
    assert max(once + double) > 50  # a stall
    assert paired_ratio(double, once).median == pytest.approx(2, abs=2 * DRIFT / 15)
    assert spread_of(once).upper / spread_of(once).lower - 1 < DRIFT


def test_drift_is_the_last_third_over_the_first():
    assert drift_of([2.0**turn for turn in range(10)]) == 128.0
    assert drift_of([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0


@pytest.mark.parametrize(("load", "cores", "noted"), [(1.0, 2, True), (0.9, 2, False)])
def test_a_machine_that_was_busy_before_gets_a_note(monkeypatch, load, cores, noted):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    notes = load_notes()
    assert bool(notes) == noted
    assert all("kept 1.0 of 2 cores busy" in note for note in notes)
