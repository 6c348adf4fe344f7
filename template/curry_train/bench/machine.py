"""Watch what disturbs a timing, and count what machine load can't disturb.

    with Machine(device) as machine:
        ...
    print(machine.remarks())

Proof: `python -m pytest tests/bench/test_machine.py`.
"""

import importlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.random import seeded, untouched
from ..workloads.workload import Case


def drift_of(seconds: Sequence[float]) -> float:
    """Return the ratio of the last third's median to the first third's; 1 below 6 timings."""
    third = len(seconds) // 3
    if third < 2:
        return 1.0
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third])


# Load of the machine during a timing: other processes on its cores, and its GPU's clock.

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


# Count the Python calls of one step, a measure of overhead that ignores machine load.


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
