"""Simulate a machine that slows down, stalls, and returns before work is done.

Its time depends only on the work given to it, so the right result of a timing is known.
"""

DRIFT = 1 / 3  # how much slower the machine gets in all
COLD = 10.0  # how much slower it is at first
STALL = 50.0


class PlantedMachine:
    """`launch` queues work, `wait` finishes it, `clock` reads the time.

    `steps` is the work to come in all, and `cold_steps` the work that is slow at first.
    """

    def __init__(self, *, steps, cold_steps=0, stall_every=11):
        self.steps, self.cold_steps, self.stall_every = steps, cold_steps, stall_every
        self.queued = self.done = self.time = 0.0
        self.num_waits = 0

    def launch(self, amount):
        self.queued += amount
        self.time += 0.001

    def wait(self):
        if not self.queued:
            return
        self.num_waits += 1
        slowness = 1 + DRIFT * self.done / self.steps
        if self.done < self.cold_steps:
            slowness *= COLD
        self.time += self.queued * slowness + STALL * (self.num_waits % self.stall_every == 0)
        self.done += self.queued
        self.queued = 0.0

    def clock(self):
        return self.time
