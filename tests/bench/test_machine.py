"""Disturbances of a timing: other processes and drift, all planted.

python -m pytest tests/bench/test_machine.py
"""

import sys

import pytest
from planted_machine import DRIFT, PlantedMachine

from curry_train.bench import report
from curry_train.bench.report import CoreTime, crowding_notes, drift_of, read_core_time
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


# 1.9 of two cores in use, 0.9 of them ours.
START = CoreTime(0.0, 100.0, 10.0)
CROWDED = CoreTime(10.0, 119.0, 19.0)


def test_cores_taken_by_other_processes_get_a_note():
    (note,) = crowding_notes(START, CROWDED, cores=2)
    assert "other processes took 1.0 of 2 cores" in note


@pytest.mark.parametrize(
    "end",
    [
        CoreTime(10.0, 120.0, 30.0),  # all of the load is ours
        CoreTime(10.0, 105.0, 10.0),  # others use half a core, and the rest is idle
        CoreTime(0.05, 119.0, 19.0),  # less time than the kernel's clock can tell
        None,  # no reading of the machine's load
    ],
)
def test_a_machine_with_idle_cores_gets_no_note(end):
    assert crowding_notes(START, end, cores=2) == []


def test_the_real_machine_is_read(monkeypatch, tmp_path):
    found = read_core_time()
    assert found is not None or sys.platform != "linux"
    monkeypatch.setattr(report, "CPU_STAT_FILE", tmp_path / "absent")
    assert read_core_time() is None
