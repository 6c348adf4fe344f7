"""Turns, medians and intervals, with a clock that is planted: what the figures are does not depend on the machine.

python -m pytest tests/bench/test_bench_turns.py
"""

import collections
import itertools
import math
import random
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from curry_train.bench import timing
from curry_train.bench.timing import (
    FASTER_VERDICT,
    NO_DIFFERENCE_VERDICT,
    SLOWER_VERDICT,
    TOO_FEW_VERDICT,
    Machine,
    Ratio,
    Reading,
    drift_of,
    order_of_rounds,
    paired_ratio,
    spread_of,
    time_in_turns,
)

CPU = torch.device("cpu")


class Clock:
    """Time that passes only where something is said to take it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def take(self, seconds):
        self.now += seconds


# Turns.


@pytest.mark.parametrize("num_ways", range(1, 9))
def test_every_way_stands_at_every_place_and_follows_every_other_one_equally_often(num_ways):
    rounds = list(itertools.islice(order_of_rounds(num_ways), 2 * num_ways))
    assert all(sorted(row) == list(range(num_ways)) for row in rounds)
    for place in range(num_ways):
        assert set(collections.Counter(row[place] for row in rounds).values()) == {2}
    pairs = collections.Counter(pair for row in rounds for pair in itertools.pairwise(row))
    assert len(pairs) == num_ways * (num_ways - 1)
    assert set(pairs.values()) <= {2}
    for row, back in zip(rounds[::2], rounds[1::2], strict=True):
        assert (
            back == row[::-1]
        )  # a machine that slows down evenly slows all of them equally over two rounds


def test_only_the_step_is_timed_and_warm_up_is_left_out():
    clock, said = Clock(), []
    ways = [lambda: clock.take(1.0), lambda: clock.take(3.0)]
    seconds = time_in_turns(
        ways,
        rounds=3,
        warmup=2,
        clock=clock,
        before=lambda: clock.take(100.0),
        tell=lambda turn, way: said.append((turn, way)),
    )
    assert seconds == [[1.0] * 3, [3.0] * 3]
    assert [turn for turn, _ in said] == [-2, -2, -1, -1, 0, 0, 1, 1, 2, 2]


def test_a_device_that_works_on_is_waited_for_and_what_was_queued_before_is_not_charged():
    clock, queue = Clock(), [7.0]  # something is on its way already

    def wait():
        clock.take(sum(queue))
        queue.clear()

    ways = [lambda: queue.append(1.0), lambda: queue.append(2.0)]
    assert time_in_turns(ways, rounds=2, warmup=0, clock=clock, wait=wait) == [
        [1.0, 1.0],
        [2.0, 2.0],
    ]
    unwaited = time_in_turns(ways, rounds=2, warmup=0, clock=clock)
    assert unwaited == [[0.0, 0.0], [0.0, 0.0]]  # what a benchmark without waiting says


@pytest.mark.parametrize(("rounds", "warmup"), [(0, 0), (1, -1)])
def test_no_rounds_are_an_error(rounds, warmup):
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        time_in_turns([lambda: None], rounds=rounds, warmup=warmup)


# Medians, ratios, intervals.


def test_a_stall_moves_neither_median_nor_tenths():
    spread = spread_of([1.0] * 19 + [100.0])
    assert (spread.median, spread.lower, spread.upper) == (1.0, 1.0, 1.0)
    assert spread_of([2.0]).relative == 0.0


def test_drift_that_doubles_every_step_leaves_the_ratio_alone():
    plain = [2.0**turn for turn in range(10)]
    found = paired_ratio([1.25 * seconds for seconds in plain], plain)
    assert (found.median, found.lower, found.upper, found.verdict) == (
        1.25,
        1.25,
        1.25,
        SLOWER_VERDICT,
    )
    assert drift_of(plain) == 128.0


@pytest.mark.parametrize(
    ("rounds", "rank", "coverage"),
    # Of the binomial distribution with one half: the ranks that tables of the sign test give.
    [
        (6, 0, 0.96875),
        (8, 0, 0.9921875),
        (9, 1, 0.9609375),
        (12, 2, 0.96142578125),
        (20, 5, 0.9586105346679688),
    ],
)
def test_the_interval_is_that_of_the_sign_test(rounds, rank, coverage):
    found = paired_ratio([float(number) for number in range(1, rounds + 1)], [1.0] * rounds)
    assert (found.lower, found.upper) == (rank + 1, rounds - rank)
    assert found.coverage == coverage


def test_five_rounds_are_too_few_for_an_interval():
    found = paired_ratio([2.0] * 5, [1.0] * 5)
    assert (found.median, found.lower, found.verdict) == (2.0, None, TOO_FEW_VERDICT)


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ((1.01, 1.2), SLOWER_VERDICT),
        ((0.8, 0.99), FASTER_VERDICT),
        ((0.99, 1.01), NO_DIFFERENCE_VERDICT),
    ],
)
def test_a_difference_is_seen_where_the_interval_leaves_one_out(bounds, verdict):
    assert Ratio(1.0, *bounds, 0.95).verdict == verdict


@pytest.mark.parametrize("true_ratio", [1.0, 1.3])
def test_the_interval_holds_the_true_ratio_in_95_of_100_runs_whatever_the_noise(true_ratio):
    draw, held = random.Random(0), 0
    for _ in range(1000):
        plain, ours = (
            [draw.lognormvariate(0, 0.2) * drift for drift in range(1, 21)] for _ in range(2)
        )
        stalled = [seconds * (8 if draw.random() < 0.1 else 1) for seconds in ours]
        both = [seconds * (8 if draw.random() < 0.1 else 1) for seconds in plain]
        found = paired_ratio([true_ratio * seconds for seconds in stalled], both)
        held += found.lower <= true_ratio <= found.upper
    assert 930 <= held <= 985  # 95.9% by rank, within three standard errors and what a tie may add


@given(st.lists(st.floats(1e-3, 1e3), min_size=6, max_size=40), st.floats(0.1, 10))
def test_a_ratio_without_noise_is_exact_for_any_times(plain, factor):
    found = paired_ratio([factor * seconds for seconds in plain], plain)
    assert math.isclose(found.median, factor, rel_tol=1e-12)
    assert found.lower <= found.median <= found.upper


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([1.0, 2.0], [1.0], "2 timings can't be compared with 1"),
        ([], [], "0 timings"),
        ([1.0], [0.0], "give it more to do"),
    ],
)
def test_timings_that_do_not_belong_together_are_an_error(ours, theirs, said):
    with pytest.raises(ValueError, match=said):
        paired_ratio(ours, theirs)
    with pytest.raises(ValueError, match="no timings"):
        spread_of([])


# The machine.


def watched(*readings, device=CPU):
    left = iter(readings)
    with Machine(device, read=lambda: next(left), cores=2) as machine:
        pass
    return machine


def test_a_machine_says_how_many_cores_others_took():
    machine = watched(
        Reading(0.0, 100.0, 10.0), Reading(10.0, 119.0, 19.0)
    )  # 1.9 cores in use, 0.9 of them ours
    assert machine.others == pytest.approx(1.0)
    assert "other processes took 1.0 of 2 cores" in machine.remarks()[0]


@pytest.mark.parametrize(
    "end",
    [
        Reading(10.0, 120.0, 30.0),  # all of it was ours
        Reading(10.0, 105.0, 10.0),  # others took half a core, and nobody wanted the rest
        Reading(10.0, None, 20.0),  # it can't be known
        Reading(0.0, 100.0, 10.0),  # nothing has passed
    ],
)
def test_a_machine_that_has_cores_left_says_nothing(end):
    assert watched(Reading(0.0, 100.0, 10.0), end).remarks() == []


def test_a_machine_whose_gpu_slows_down_says_so():
    machine = watched(
        Reading(0.0, None, 0.0, 1980), Reading(1.0, None, 0.0, 1410), device=torch.device("cuda")
    )
    assert machine.remarks()[0].startswith("the GPU's clock fell from 1980 to 1410 MHz")
    assert watched(Reading(0.0, None, 0.0, 1980), Reading(1.0, None, 0.0, 1965)).remarks() == []


def test_a_machine_is_read_as_it_is():
    with Machine(CPU) as machine:
        time.sleep(1.5 * timing.SHORTEST_SECONDS)
    assert machine.others is None or machine.others >= 0
    if sys.platform == "linux":
        assert machine.others is not None


def test_a_machine_without_its_figures_is_read_as_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "CPU_STAT_FILE", tmp_path / "absent")
    with Machine(CPU) as machine:
        pass
    assert machine.others is None


def test_what_is_too_short_for_the_clock_of_the_kernel_says_nothing_of_others():
    readings = iter([Reading(0.0, 5.0, 0.0), Reading(1e-4, 5.01, 1e-4)])
    with Machine(torch.device("cpu"), read=lambda: next(readings), cores=2) as machine:
        pass
    assert machine.others is None
    assert machine.remarks() == []


def test_a_machine_whose_gpu_does_not_tell_its_clock_says_nothing_of_it(monkeypatch):
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
