"""Time ways to do the same work in turns, and compare them in pairs.

plain, ours = time_in_turns([step, our_step], rounds=20, warmup=5, wait=torch.cuda.synchronize)

A round runs each way once. Rounds come in pairs, the second in reverse order, and each pair starts
with another way. Over a cycle every way has every position, and follows every other way, equally
often.

Proof: `python -m pytest tests/bench/test_bench_turns.py tests/core/test_measure.py`.
"""

import importlib
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.random import seeded, untouched
from ..workloads.workload import Case

# ------------------------------------------------------------------------------
# Time several ways of doing work in turns, so that machine drift affects all alike.
# ------------------------------------------------------------------------------

Clock = Callable[[], float]
Act = Callable[[], object]


def order_of_rounds(num_ways: int) -> Iterator[list[int]]:
    """Yield the order of the ways, by number, for one round after another, without end."""
    # The offsets are 0, 1, -1, 2, -2, ...
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(num_ways)]
    while True:
        for first in range(num_ways):
            row = [(first + offset) % num_ways for offset in zigzag]
            yield row
            yield row[::-1]


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
    order = order_of_rounds(len(ways))
    for turn in range(warmup + rounds):
        for way in next(order):
            tell(turn - warmup, way)
            before()
            wait()
            start = clock()
            ways[way]()
            wait()
            taken = clock() - start
            if turn >= warmup:
                seconds[way].append(taken)
    return seconds


# ------------------------------------------------------------------------------
# Statistics of repeated timings: medians, spreads, and ratios with an interval.
# ------------------------------------------------------------------------------

INTERVAL_COVERAGE = 0.95
FASTER_VERDICT = "faster"
SLOWER_VERDICT = "slower"
NO_DIFFERENCE_VERDICT = "no difference seen"
TOO_FEW_VERDICT = "too few rounds to tell"

# Rounds. Of 5 rounds, the smallest and the largest enclose the median in 93.75% of cases, which is
# less than COVERAGE.
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
    if not seconds:
        raise ValueError("there are no timings to take the median of: run at least one round")
    if len(seconds) == 1:
        return Spread(seconds[0], seconds[0], seconds[0])
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Spread(statistics.median(seconds), tenths[0], tenths[-1])


def paired_ratio(
    seconds: Sequence[float], reference: Sequence[float], *, coverage: float = INTERVAL_COVERAGE
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


# ------------------------------------------------------------------------------
# Load of the machine during a timing: other processes on its cores, and its GPU's clock.
# ------------------------------------------------------------------------------

CPU_STAT_FILE = Path("/proc/stat")

# From this share of all cores in use on, a process that needs one more core has to wait.
CROWDED_SHARE = 0.9

# Up to this share of all cores, other processes are the machine's own housekeeping.
HOUSEKEEPING_SHARE = 0.1

# Seconds. The kernel counts in hundredths, and in less time one of them would be many cores.
SHORTEST_SECONDS = 0.1

# Below this share of its clock at the start, the GPU counts as slowed down.
SLOWED_CLOCK_SHARE = 0.95


@dataclass(frozen=True)
class Reading:
    """Wall clock, core time used so far, and the GPU's clock at one moment."""

    # Seconds of the wall clock.
    wall: float

    # Seconds of core time of all processes.
    all_cores: float | None

    # Seconds of core time of this process.
    own: float

    # Clock of the GPU.
    megahertz: int | None = None


class Machine:
    """Context around a timing; afterwards `remarks` lists what disturbed it."""

    def __init__(
        self,
        device: torch.device,
        *,
        read: Callable[[], Reading] | None = None,
        cores: int | None = None,
    ):
        self._read = read or (lambda: _reading(device))
        self._cores = cores or os.cpu_count() or 1
        self._on_cpu = device.type != "cuda"

    def __enter__(self) -> "Machine":
        self._start = self._end = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = self._read()

    @property
    def others(self) -> float | None:
        """Cores that other processes kept busy; None if that can't be determined."""
        start = self._start
        end = self._end
        if (
            start.all_cores is None
            or end.all_cores is None
            or end.wall - start.wall < SHORTEST_SECONDS
        ):
            return None
        others_seconds = end.all_cores - start.all_cores - end.own + start.own
        return max(0.0, others_seconds / (end.wall - start.wall))

    def remarks(self) -> list[str]:
        """List what disturbed the timing, in sentences for the user."""
        found = []
        wall = self._end.wall - self._start.wall
        if self.others is not None and wall > 0:
            used = self.others + (self._end.own - self._start.own) / wall
            if (
                self.others > HOUSEKEEPING_SHARE * self._cores
                and used > CROWDED_SHARE * self._cores
            ):
                work = "steps" if self._on_cpu else "launches of kernels"
                found.append(
                    f"other processes took {self.others:.1f} of {self._cores} cores meanwhile, and "
                    f"{work} waited for them: trust the ratios more than the seconds, or run again "
                    "when they have ended"
                )

        before = self._start.megahertz
        after = self._end.megahertz
        if before and after and after < SLOWED_CLOCK_SHARE * before:
            found.append(
                f"the GPU's clock fell from {before} to {after} MHz, from heat or its power limit: "
                "take more warm-up steps to measure the clock that it can sustain"
            )
        return found


def _reading(device: torch.device) -> Reading:
    return Reading(time.perf_counter(), _seconds_of_all(), time.process_time(), _megahertz(device))


def _seconds_of_all() -> float | None:
    """Sum the core time of user, nice, system, interrupts and steal; None without /proc/stat."""
    if not CPU_STAT_FILE.is_file():
        return None
    first_line = CPU_STAT_FILE.read_text(encoding="ascii").split("\n", 1)[0]
    fields = [int(field) for field in first_line.split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = fields
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def _megahertz(device: torch.device) -> int | None:
    """Read the GPU's clock; None without pynvml, or where it refuses, as on MIG slices.

    Not yet measured on CUDA.
    """
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        return None
    refused: type[Exception] = importlib.import_module("pynvml").NVMLError
    try:
        return torch.cuda.clock_rate(device)
    except refused:
        return None


# ------------------------------------------------------------------------------
# Count the Python calls of one step, a measure of overhead that ignores machine load.
# ------------------------------------------------------------------------------


def python_calls(case: Case, change: Callable[[nn.Module, Case], Any]) -> int:
    """Count the Python calls in one step of a model after `change` is applied to it.

    The step runs at batch size 1 and on the CPU, where backward stays in this thread. A first step
    that is not counted does the work that happens only once.
    """
    case = replace(case, device=torch.device("cpu"), batch_size=1)
    module = case.build()
    batch = case.batch()
    num_calls = 0
    with seeded(case.seed):
        change(module, case)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    with untouched(module):
        case.workload.mean_loss(module, batch).backward()
        previous = sys.getprofile()
        sys.setprofile(count)
        try:
            case.workload.mean_loss(module, batch).backward()
        finally:
            sys.setprofile(previous)
    return num_calls
