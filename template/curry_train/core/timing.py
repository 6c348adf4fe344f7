"""Time ways to do the same work in turns, and compare them in pairs.

    plain, ours = time_in_turns([step, our_step], rounds=20, warmup=5)

A round runs each way once. Rounds come in pairs, the second in reverse order, and each pair starts
with another way. Over a cycle every way has every position, and follows every other way, equally
often.

Proof: `python -m pytest tests/core/test_timing.py`.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

# The device that a name stands for.


class NoSuchDevice(RuntimeError):
    """The requested device is not on this machine."""


def find_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is CUDA where available, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise NoSuchDevice(
            f"no CUDA device: torch {torch.__version__} (built for CUDA: {torch.version.cuda}) "
            "finds none. Use --device cpu"
        )
    return torch.device(name)


# Time several ways of doing work in turns, so that machine drift affects all alike.

Clock = Callable[[], float]
Act = Callable[[], object]


def order_of_rounds(num_ways: int) -> Iterator[list[int]]:
    """Yield the order of the ways, by number, for one round after another; none without a way."""
    # The offsets are 0, 1, -1, 2, -2, ...
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(num_ways)]
    for first in itertools.cycle(range(num_ways)):
        row = [(first + offset) % num_ways for offset in zigzag]
        yield row
        yield row[::-1]


def wait_for(device: torch.device) -> None:
    """Return once the device has finished all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_in_turns(
    ways: Sequence[Act],
    *,
    rounds: int,
    warmup: int,
    clock: Clock = time.perf_counter,
    wait: Act = lambda: None,
    before: Act = lambda: None,
    tell: Callable[[int, int], None] = lambda turn, way: None,
) -> list[list[float]]:
    """Return the seconds of each way, one figure for each round after the warm-up.

    `wait` must return once the device has finished all of its work, so that the time between two
    readings is that of one step only. `before` is called before each step and is not timed. `tell`
    is called before that with the number of the round, negative in the warm-up, and of the way.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(
            f"rounds must be at least 1 and warmup at least 0, got {rounds} and {warmup}"
        )
    seconds: list[list[float]] = [[] for _ in ways]
    for turn, order in zip(range(-warmup, rounds), order_of_rounds(len(ways)), strict=False):
        for way in order:
            tell(turn, way)
            before()
            wait()
            start = clock()
            ways[way]()
            wait()
            taken = clock() - start
            if turn >= 0:
                seconds[way].append(taken)
    return seconds


# Statistics of repeated timings: medians, spreads, and ratios with an interval.

# The shares of all timings that are below the figures of a spread.
SHARES = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
INTERVAL_COVERAGE = 0.95
FASTER_VERDICT = "faster"
SLOWER_VERDICT = "slower"
NO_DIFFERENCE_VERDICT = "no difference seen"
TOO_FEW_VERDICT = "too few rounds to tell"

# Rounds. Of 5 rounds, the smallest and the largest enclose the median in 93.75% of cases, which is
# less than INTERVAL_COVERAGE.
FEWEST_ROUNDS = 6


@dataclass(frozen=True)
class Spread:
    """The median of repeated timings, with the 10th and the 90th percentile."""

    median: float
    lower: float
    upper: float

    @property
    def relative(self) -> float:
        return (self.upper - self.lower) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' ratios, with its confidence interval.

    The interval contains the true median in a share of `coverage` of all cases. It is None if there
    are too few rounds.
    """

    median: float
    lower: float | None
    upper: float | None
    coverage: float | None

    @property
    def verdict(self) -> str:
        if self.lower is None or self.upper is None:
            return TOO_FEW_VERDICT
        if self.lower > 1:
            return SLOWER_VERDICT
        return FASTER_VERDICT if self.upper < 1 else NO_DIFFERENCE_VERDICT


def spread_of(seconds: Sequence[float]) -> Spread:
    return Spread(*torch.tensor(seconds, dtype=torch.float64).quantile(SHARES).tolist())


def paired_ratio(seconds: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Return the ratio to the reference, from timings of the same rounds in the same order."""
    if min(reference) <= 0:
        raise ValueError(
            f"the reference took {min(reference)} seconds in one round: give it more to do"
        )
    ratios = sorted(ours / theirs for ours, theirs in zip(seconds, reference, strict=True))
    found = Ratio(statistics.median(ratios), None, None, None)
    # Each ratio is above the true median with probability 1/2, so the number of ratios above it is
    # binomial. The interval is the innermost one, from both ends, that reaches the coverage.
    outside = 0
    for rank in range((len(ratios) + 1) // 2):
        outside += math.comb(len(ratios), rank)
        reached = 1 - 2 * outside / 2 ** len(ratios)
        if reached < INTERVAL_COVERAGE:
            break
        found = Ratio(found.median, ratios[rank], ratios[-1 - rank], reached)
    return found
