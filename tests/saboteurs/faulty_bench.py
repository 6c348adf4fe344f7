"""Faults of the benchmark: intervals, steps that are timed, FLOPs and peaks.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import itertools
import statistics
from dataclasses import replace
from unittest import mock

import torch
from saboteurs import planted

from curry_train.bench.report import measure_levers
from curry_train.bench.steps import TrainingStep
from curry_train.core.measure import bytes_on_device, peak_of_step
from curry_train.core.timing import Ratio, paired_ratio


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


def never_certain(ours, theirs):
    return replace(paired_ratio(ours, theirs), lower=0.0, upper=float("inf"))


class GradientsKept(TrainingStep):
    def __call__(self):
        with mock.patch.object(self.optimizer, "zero_grad"):
            return super().__call__()


class Trains(TrainingStep):
    """Time with a learning rate, so that each step starts from different weights."""

    def __init__(self, case, *, learning_rate=1e-3):
        super().__init__(case, learning_rate=learning_rate)


def leaves_a_seed(case, *args, **options):
    found = measure_levers(case, *args, **options)
    torch.manual_seed(0)
    return found


def changing(change):
    """Return a benchmark whose rows are changed."""

    def measure(case, *args, **options):
        found = measure_levers(case, *args, **options)
        for row in found.rows:
            change(case, row, found.plain)
        return found

    return measure


def flops_of_a_microbatch(case, row, plain):
    row.model_flops //= row.num_microbatches


def all_flops_that_ran(case, row, plain):
    """Count recomputed FLOPs as the model's, which raises the utilisation."""
    row.model_flops = row.executed_flops


def without_optimizer_state(case, row, plain):
    row.peak_bytes -= 2 * bytes_on_device(case.build().parameters(), case.device)


def peak_of_forward(case, *args, **options):
    def peak_bytes(self):
        def forward():
            return self.loss(self.model, self.window.microbatches[0])

        return peak_of_step(forward, self._there(), self.device)

    with mock.patch.object(TrainingStep, "peak_bytes", peak_bytes):
        return measure_levers(case, *args, **options)


FAULTS = [
    planted("bench.interval", "one-standard-error", time=planted_times, ratio=one_standard_error),
    planted("bench.difference", "never-certain", time=planted_times, ratio=never_certain),
    planted("bench.training", "gradients-kept", make=GradientsKept, model="dropout"),
    planted("bench.weights", "trains", make=Trains, model="dropout"),
    planted("bench.generators", "leaves-a-seed", measure=leaves_a_seed, hint="generator"),
    planted("bench.model-flops", "microbatch", measure=changing(flops_of_a_microbatch)),
    planted("bench.utilization", "all-that-ran", measure=changing(all_flops_that_ran)),
    planted("bench.peak", "optimizer-state", measure=changing(without_optimizer_state)),
    planted("bench.peak", "of-forward", measure=peak_of_forward, hint="an owner is missing"),
]
