"""What else the machine did while something was timed: other processes on its cores, and the clock of its GPU.

    with Machine(device) as machine:
        ...
    print(machine.remarks())

Linux tells what all processes used, in /proc/stat; elsewhere nothing is said of them.
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
CROWDED = 0.9  # of all cores in use: whoever wants one more has to wait
OTHERS = 0.1  # of all cores that others take, below which they are the machine's own housekeeping
SHORTEST = 0.1  # seconds; the kernel counts in hundredths, of which one would be many cores in less
SLOWED = 0.95  # of the GPU's clock at the start


@dataclass(frozen=True)
class Reading:
    """Seconds of core time that all processes and this one have used, and the wall clock; megahertz of the GPU."""

    wall: float
    all_cores: float | None
    own: float
    megahertz: int | None = None


class Machine:
    """A context; afterwards `remarks` says what spoils timings."""

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
        """Cores that other processes kept busy; None where it can't be known."""
        start, end = self._start, self._end
        if start.all_cores is None or end.all_cores is None or end.wall - start.wall < SHORTEST:
            return None
        return max(
            0.0, (end.all_cores - start.all_cores - end.own + start.own) / (end.wall - start.wall)
        )

    def remarks(self) -> list[str]:
        said = []
        wall = self._end.wall - self._start.wall
        if self.others is not None and wall > 0:
            used = self.others + (self._end.own - self._start.own) / wall
            if self.others > OTHERS * self._cores and used > CROWDED * self._cores:
                work = "steps" if self._on_cpu else "launches of kernels"
                said.append(
                    f"other processes took {self.others:.1f} of {self._cores} cores meanwhile, and {work} waited for "
                    "them: trust the ratios more than the seconds, or run again when they have ended"
                )
        before, after = self._start.megahertz, self._end.megahertz
        if before and after and after < SLOWED * before:
            said.append(
                f"the GPU's clock fell from {before} to {after} MHz, by heat or its power limit: more warm-up steps "
                "show what it keeps up"
            )
        return said


def _reading(device: torch.device) -> Reading:
    return Reading(time.perf_counter(), _seconds_of_all(), time.process_time(), _megahertz(device))


def _seconds_of_all() -> float | None:
    """User, nice, system, interrupts and what the host gave to other guests."""
    if not STAT.is_file():
        return None
    fields = [
        int(field) for field in STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    ]
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = fields
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def _megahertz(device: torch.device) -> int | None:
    """Not yet measured on CUDA; nothing where NVIDIA's library is missing, or does not tell as in parts of a card."""
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        return None
    refused: type[Exception] = importlib.import_module("pynvml").NVMLError
    try:
        return torch.cuda.clock_rate(device)
    except refused:
        return None
