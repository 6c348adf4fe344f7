"""What repeated timings say: a median with its spread, and the ratio of two ways from the rounds that they share.

    ratio = paired_ratio(ours, plain)
    print(ratio.median, ratio.lower, ratio.upper, ratio.verdict)

Both ways of a round met the same machine, so their ratio is freed of what it did. The interval for the median ratio
comes from order statistics: it takes no distribution for granted, only rounds that do not hang together.
Proof: `python -m pytest tests/test_bench_turns.py`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

COVERAGE = 0.95
FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference seen"
TOO_FEW = "too few rounds to tell"
FEWEST = 6  # rounds: between the ends of 5 lies the median in 93.75% of cases, which is less than COVERAGE


@dataclass(frozen=True)
class Spread:
    """The median of repeated timings, and the tenth and ninetieth of a hundred."""

    median: float
    lower: float
    upper: float

    @property
    def relative(self) -> float:
        return (self.upper - self.lower) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' ratios, with an interval that holds the true one in `coverage` of all cases; without
    one where the rounds are too few."""

    median: float
    lower: float | None
    upper: float | None
    coverage: float | None

    @property
    def verdict(self) -> str:
        if self.lower is None or self.upper is None:
            return TOO_FEW
        return SLOWER if self.lower > 1 else FASTER if self.upper < 1 else NO_DIFFERENCE


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
    """How much longer than the reference, from figures of the same rounds in the same order."""
    if len(seconds) != len(reference) or not seconds:
        raise ValueError(
            f"{len(seconds)} timings can't be held against {len(reference)}: give those of the same rounds, one or more"
        )
    if min(reference) <= 0:
        raise ValueError(
            f"the reference took {min(reference)} seconds in some round: give it more to do"
        )
    ratios = sorted(ours / theirs for ours, theirs in zip(seconds, reference, strict=True))
    rank, reached = _rank(len(ratios), coverage)
    if rank is None:
        return Ratio(statistics.median(ratios), None, None, None)
    return Ratio(statistics.median(ratios), ratios[rank], ratios[-1 - rank], reached)


def drift_of(seconds: Sequence[float]) -> float:
    """How the last third compares with the first one; 1 where there are too few to tell."""
    third = len(seconds) // 3
    return (
        statistics.median(seconds[-third:]) / statistics.median(seconds[:third])
        if third >= 2
        else 1.0
    )


def _rank(num: int, coverage: float) -> tuple[int | None, float | None]:
    """The innermost ranks, from both ends, between which the median lies often enough: a coin thrown `num` times."""
    found: tuple[int | None, float | None] = (None, None)
    outside = 0
    for rank in range((num + 1) // 2):
        outside += math.comb(num, rank)
        reached = 1 - 2 * outside / 2**num
        if reached < coverage:
            break
        found = rank, reached
    return found
