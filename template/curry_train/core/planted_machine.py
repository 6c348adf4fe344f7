"""A machine that goes wrong in all the ways that spoil timings, and whose time is an account of the work given to it.

It slows down as it goes, is slow before it is warm, stalls now and then, and answers before it has done the work. What
a right measurement says of it is known, whoever else is busy on the real one.
Proof: `python -m pytest tests/test_bench.py`.
"""


class PlantedMachine:
    """`launch` hands it work, `wait` lets it finish, `clock` reads its time. `steps` is all the work to come and
    `cold_steps` what is slow at first, both in units of `unit`."""

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
        self._unit, self._steps, self._cold_steps, self._cold = unit, steps, cold_steps, cold
        self._stall_every, self._stall = stall_every, stall_steps * unit
        self._launch = 0.001 * unit
        self._queued = self._done = self._time = 0.0
        self._num_waits = 0

    def launch(self, amount: float) -> None:
        """Takes next to no time of whoever asks."""
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
        """How much slower it gets over so much work."""
        return self.drift * steps / self._steps
