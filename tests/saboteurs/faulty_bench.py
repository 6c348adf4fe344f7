"""Faults of the benchmark: intervals, steps that are timed, FLOPs and peaks.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import itertools
import statistics
from dataclasses import replace

from curry_train.core.timing import Ratio, paired_ratio
from curry_train.gates import bench

from .saboteurs import planted


def planted_times(ways, *, rounds, **options):
    """Time two equally fast kinds of step, with noise and a stall."""
    noise = itertools.cycle([1.00, 1.02, 0.99, 1.04, 1.01, 0.97, 1.03])
    times = [list(itertools.islice(noise, rounds)) for _ in ways]
    times[0][3] = 9.0
    return times


def one_standard_error(ours, theirs):
    """Return an interval that is too narrow: one standard error of the mean."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    middle = statistics.median(ratios)
    error = statistics.stdev(sorted(ratios)[1:-1]) / len(ratios) ** 0.5
    return Ratio(middle, middle - error, middle + error, 0.95)


def no_interval(ours, theirs):
    found = paired_ratio(ours, theirs)
    return replace(found, lower=found.median, upper=found.median)


def fault(name, interval):
    patches = [(bench, "time_in_turns", planted_times), (bench, "paired_ratio", interval)]
    return planted("bench.interval", name, patches=patches)


FAULTS = [fault("one-standard-error", one_standard_error), fault("none", no_interval)]
