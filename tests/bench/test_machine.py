"""Disturbances of a timing: other processes, the GPU's clock, and drift, all planted.

python -m pytest tests/bench/test_machine.py
"""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from planted_machine import DRIFT, PlantedMachine

from curry_train.bench import report
from curry_train.bench.report import Machine, Reading, drift_of
from curry_train.core.timing import paired_ratio, spread_of, time_in_turns

CPU = torch.device("cpu")


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


def watched(*readings, device=CPU):
    left = iter(readings)
    with Machine(device, read=lambda: next(left), cores=2) as machine:
        pass
    return machine


def test_cores_taken_by_other_processes_get_a_note():
    machine = watched(
        Reading(0.0, 100.0, 10.0), Reading(10.0, 119.0, 19.0)
    )  # 1.9 cores in use, 0.9 of them ours
    assert machine.others == pytest.approx(1.0)
    assert "other processes took 1.0 of 2 cores" in machine.remarks()[0]


@pytest.mark.parametrize(
    "end",
    [
        Reading(10.0, 120.0, 30.0),  # all of the load is ours
        Reading(10.0, 105.0, 10.0),  # others use half a core, and the rest is idle
        Reading(10.0, None, 20.0),  # no reading of the machine's load
        Reading(0.0, 100.0, 10.0),  # no time has passed
    ],
)
def test_a_machine_with_idle_cores_gets_no_note(end):
    assert watched(Reading(0.0, 100.0, 10.0), end).remarks() == []


def test_a_gpu_whose_clock_falls_gets_a_note():
    machine = watched(
        Reading(0.0, None, 0.0, 1980), Reading(1.0, None, 0.0, 1410), device=torch.device("cuda")
    )
    assert machine.remarks()[0].startswith("the GPU's clock fell from 1980 to 1410 MHz")
    assert watched(Reading(0.0, None, 0.0, 1980), Reading(1.0, None, 0.0, 1965)).remarks() == []


def test_the_real_machine_is_read():
    with Machine(CPU) as machine:
        time.sleep(1.5 * report.SHORTEST_SECONDS)
    assert machine.others is None or machine.others >= 0
    if sys.platform == "linux":
        assert machine.others is not None


def test_missing_figures_of_a_machine_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "CPU_STAT_FILE", tmp_path / "absent")
    with Machine(CPU) as machine:
        pass
    assert machine.others is None


def test_a_time_below_the_kernels_clock_gets_no_note_on_other_processes():
    readings = iter([Reading(0.0, 5.0, 0.0), Reading(1e-4, 5.01, 1e-4)])
    with Machine(torch.device("cpu"), read=lambda: next(readings), cores=2) as machine:
        pass
    assert machine.others is None
    assert machine.remarks() == []


def test_a_gpu_without_a_readable_clock_gets_no_note(monkeypatch):
    class Refused(Exception):
        pass

    def refuse(device):
        raise Refused

    monkeypatch.setitem(
        sys.modules, "pynvml", SimpleNamespace(NVMLError=Refused, __spec__=object())
    )
    monkeypatch.setattr(torch.cuda, "clock_rate", refuse)
    with Machine(torch.device("cuda")) as machine:
        pass
    assert machine.remarks() == []
    rates = iter([1980, 1000])
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: next(rates))
    with Machine(torch.device("cuda")) as machine:
        pass
    assert "1980 to 1000" in machine.remarks()[0]
