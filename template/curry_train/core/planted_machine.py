"""Simulated machine with a faulty clock, to test timings against known figures.

It slows down over time, is slow before it is warm, stalls now and then, and returns from a launch
before the work is done. Its time depends only on the work given to it, so the right result of a
measurement is known, whatever else runs on the real machine.

Proof: `python -m pytest tests/test_bench.py`.
"""


class PlantedMachine:
    """Simulated machine: `launch` queues work, `wait` finishes it, `clock` reads the time.

    `steps` is the amount of work to come in all and `cold_steps` the amount that is slow at first,
    both in units of `unit`.
    """

    def __init__(
        self,
        *,
        unit: float,
        steps: float,
        cold_steps: float,
        drift: float = 1 / 3,
        cold: float = 10.0,
        stall_every: int = 11,
        stall_steps: float = 50.0,
    ) -> None:
        self.drift = drift
        self._unit = unit
        self._steps = steps
        self._cold_steps = cold_steps
        self._cold = cold
        self._stall_every = stall_every
        self._stall = stall_steps * unit
        self._launch = 0.001 * unit
        self._queued = 0.0
        self._done = 0.0
        self._time = 0.0
        self._num_waits = 0

    def launch(self, amount: float) -> None:
        """Queue work; the call itself takes almost no time."""
        self._queued += amount
        self._time += self._launch

    def wait(self) -> None:
        if not self._queued:
            return
        self._num_waits += 1
        slowness = 1 + self.drift * self._done / (self._steps * self._unit)
        if self._done < self._cold_steps * self._unit:
            slowness *= self._cold
        if self._num_waits % self._stall_every == 0:
            self._time += self._stall
        self._time += self._queued * slowness
        self._done += self._queued
        self._queued = 0.0

    def clock(self) -> float:
        return self._time

    def drift_of(self, steps: float) -> float:
        """Return how much slower the machine gets over so many steps, as a share."""
        return self.drift * steps / self._steps
