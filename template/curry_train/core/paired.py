"""Statistics of repeated timings: medians, spreads, and ratios with an interval.

    ratio = paired_ratio(ours, plain)
    print(ratio.median, ratio.lower, ratio.upper, ratio.verdict)

Both ways of a round ran under the same machine load, so that the load cancels in their ratio.
The interval for the median ratio comes from order statistics: it assumes no distribution, only that
the rounds are independent.

Proof: `python -m pytest tests/test_bench_turns.py`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

COVERAGE = 0.95
FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no difference seen"
TOO_FEW = "too few rounds to tell"

# Rounds. Of 5 rounds, the smallest and the largest enclose the median in 93.75% of cases, which is
# less than COVERAGE.
FEWEST = 6


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
            return TOO_FEW
        if self.lower > 1:
            return SLOWER
        return FASTER if self.upper < 1 else NO_DIFFERENCE


def spread_of(seconds: Sequence[float]) -> Spread:
    if not seconds:
        raise ValueError("there are no timings to take the median of: run at least one round")
    if len(seconds) == 1:
        return Spread(seconds[0], seconds[0], seconds[0])
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Spread(statistics.median(seconds), tenths[0], tenths[-1])


def paired_ratio(
    seconds: Sequence[float], reference: Sequence[float], *, coverage: float = COVERAGE
) -> Ratio:
    """Return the ratio to the reference, from timings of the same rounds in the same order."""
    if len(seconds) != len(reference) or not seconds:
        raise ValueError(
            f"{len(seconds)} timings can't be compared with {len(reference)}: give one timing of "
            "each for the same rounds, at least one round"
        )
    if min(reference) <= 0:
        raise ValueError(
            f"the reference took {min(reference)} seconds in one round: give it more to do"
        )
    ratios = sorted(ours / theirs for ours, theirs in zip(seconds, reference, strict=True))
    rank, reached = _rank(len(ratios), coverage)
    if rank is None:
        return Ratio(statistics.median(ratios), None, None, None)
    return Ratio(statistics.median(ratios), ratios[rank], ratios[-1 - rank], reached)


def drift_of(seconds: Sequence[float]) -> float:
    """Return the ratio of the last third's median to the first third's; 1 below 6 timings."""
    third = len(seconds) // 3
    if third < 2:
        return 1.0
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third])


def _rank(num: int, coverage: float) -> tuple[int | None, float | None]:
    """Return the innermost rank, from both ends, that reaches the coverage, and its coverage.

    Each of `num` values is above the true median with probability 1/2, so the number of values
    above it is binomial.
    """
    innermost: tuple[int | None, float | None] = (None, None)
    outside = 0
    for rank in range((num + 1) // 2):
        outside += math.comb(num, rank)
        reached = 1 - 2 * outside / 2**num
        if reached < coverage:
            break
        innermost = rank, reached
    return innermost
