"""Load of the machine during a timing: other processes on its cores, and its GPU's clock.

    with Machine(device) as machine:
        ...
    print(machine.remarks())

Linux reports the core time of all processes in /proc/stat; on other systems they are not checked.

Proof: `python -m pytest tests/test_bench_turns.py -k machine`.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

STAT = Path("/proc/stat")

# From this share of all cores in use on, a process that needs one more core has to wait.
CROWDED = 0.9

# Up to this share of all cores, other processes are the machine's own housekeeping.
OTHERS = 0.1

# Seconds. The kernel counts in hundredths, and in less time one of them would be many cores.
SHORTEST = 0.1

# Below this share of its clock at the start, the GPU counts as slowed down.
SLOWED = 0.95


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
        if start.all_cores is None or end.all_cores is None or end.wall - start.wall < SHORTEST:
            return None
        others_seconds = end.all_cores - start.all_cores - end.own + start.own
        return max(0.0, others_seconds / (end.wall - start.wall))

    def remarks(self) -> list[str]:
        """List what disturbed the timing, in sentences for the user."""
        found = []
        wall = self._end.wall - self._start.wall
        if self.others is not None and wall > 0:
            used = self.others + (self._end.own - self._start.own) / wall
            if self.others > OTHERS * self._cores and used > CROWDED * self._cores:
                work = "steps" if self._on_cpu else "launches of kernels"
                found.append(
                    f"other processes took {self.others:.1f} of {self._cores} cores meanwhile, and "
                    f"{work} waited for them: trust the ratios more than the seconds, or run again "
                    "when they have ended"
                )

        before = self._start.megahertz
        after = self._end.megahertz
        if before and after and after < SLOWED * before:
            found.append(
                f"the GPU's clock fell from {before} to {after} MHz, from heat or its power limit: "
                "take more warm-up steps to measure the clock that it can sustain"
            )
        return found


def _reading(device: torch.device) -> Reading:
    return Reading(time.perf_counter(), _seconds_of_all(), time.process_time(), _megahertz(device))


def _seconds_of_all() -> float | None:
    """Sum the core time of user, nice, system, interrupts and steal; None without /proc/stat."""
    if not STAT.is_file():
        return None
    first_line = STAT.read_text(encoding="ascii").split("\n", 1)[0]
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
