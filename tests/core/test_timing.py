"""Turns, medians and intervals of the timer, with a planted clock.

python -m pytest tests/core/test_timing.py
"""

import collections
import itertools

import pytest

from curry_train.core.timing import (
    FASTER_VERDICT,
    NO_DIFFERENCE_VERDICT,
    SLOWER_VERDICT,
    Ratio,
    order_of_rounds,
    paired_ratio,
    time_in_turns,
)


class Clock:
    """A clock that moves only when `take` is called."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def take(self, seconds):
        self.now += seconds


# Turns.


@pytest.mark.parametrize("num_ways", range(1, 9))
def test_every_setup_has_every_position_and_every_predecessor_equally_often(num_ways):
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
        )  # an even slowdown of the machine affects all ways equally over two rounds


def test_the_clock_waits_for_the_device_and_excludes_work_queued_before():
    clock, queue = Clock(), [7.0]  # work that was queued before

    def wait():
        clock.take(sum(queue))
        queue.clear()

    ways = [lambda: queue.append(1.0), lambda: queue.append(2.0)]
    assert time_in_turns(ways, rounds=2, warmup=0, clock=clock, wait=wait) == [
        [1.0, 1.0],
        [2.0, 2.0],
    ]
    unwaited = time_in_turns(ways, rounds=2, warmup=0, clock=clock)
    assert unwaited == [[0.0, 0.0], [0.0, 0.0]]  # the result of a benchmark that does not wait


# Medians, ratios, intervals.


@pytest.mark.parametrize(
    ("rounds", "rank", "coverage"),
    # Ranks from tables of the sign test: the binomial distribution with probability one half.
    [
        (6, 0, 0.96875),
        (9, 1, 0.9609375),
        (20, 5, 0.9586105346679688),
    ],
)
def test_the_interval_is_that_of_the_sign_test(rounds, rank, coverage):
    found = paired_ratio([float(number) for number in range(1, rounds + 1)], [1.0] * rounds)
    assert (found.lower, found.upper) == (rank + 1, rounds - rank)
    assert found.coverage == coverage


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ((1.01, 1.2), SLOWER_VERDICT),
        ((0.8, 0.99), FASTER_VERDICT),
        ((0.99, 1.01), NO_DIFFERENCE_VERDICT),
    ],
)
def test_a_difference_is_seen_when_the_interval_excludes_one(bounds, verdict):
    assert Ratio(1.0, *bounds, 0.95).verdict == verdict
