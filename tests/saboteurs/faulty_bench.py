"""Faults of the benchmark: clocks, intervals, steps that are timed, FLOPs and peaks.

Proof: `python -m pytest tests/gates/test_bench.py`.
"""

import itertools
import statistics
from dataclasses import replace
from unittest import mock

import torch
from saboteurs import planted

from curry_train.bench import report
from curry_train.bench.report import measure_levers
from curry_train.bench.steps import PLAIN_LEVER, TrainingStep, find_lever, python_calls
from curry_train.core.measure import bytes_on_device, peak_of_step
from curry_train.core.timing import Ratio, Spread, paired_ratio, time_in_turns
from curry_train.primitives.grad_accum import train_window
from curry_train.workloads.workload import batch_size, take


def without_waiting(ways, *, rounds, warmup, clock, wait, **options):
    """Read the clock before the device is done, which charges the time to the next step."""
    return time_in_turns(ways, rounds=rounds, warmup=warmup, clock=clock)


def waiting_before_alone(ways, *, rounds, warmup, clock, wait, **options):
    return time_in_turns(ways, rounds=rounds, warmup=warmup, clock=clock, before=wait)


def one_after_the_other(ways, *, rounds, warmup, **options):
    """Time all steps of the first kind, then all of the second."""
    times = [time_in_turns([way], rounds=rounds, warmup=warmup, **options) for way in ways]
    return [seconds for (seconds,) in times]


def warmup_counted(ways, *, rounds, warmup, **options):
    return time_in_turns(ways, rounds=rounds + warmup, warmup=0, **options)


def ratio_of_means(ours, theirs):
    found = paired_ratio(ours, theirs)
    return replace(found, median=statistics.mean(ours) / statistics.mean(theirs))


def ends(seconds):
    return Spread(statistics.median(seconds), min(seconds), max(seconds))


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


def without_interval(ours, theirs):
    return Ratio(paired_ratio(ours, theirs).median, None, None, None)


def one_sided(ours, theirs):
    """Report the first of a pair as slower, always."""
    found = paired_ratio(ours, theirs)
    return replace(found, lower=found.median * 1.001, upper=found.median * 1.2)


class WithoutOptimizer(TrainingStep):
    def __call__(self):
        before = self.optimizer.step
        self.optimizer.step = lambda: None
        result = super().__call__()
        self.optimizer.step = before
        return result


class GradientsKept(TrainingStep):
    def __call__(self):
        before = self.optimizer.zero_grad
        self.optimizer.zero_grad = lambda set_to_none=True: None
        result = super().__call__()
        self.optimizer.zero_grad = before
        return result


class SumNotMean(TrainingStep):
    def loss(self, module, microbatch):
        return super().loss(module, microbatch) * self.num_terms


class InEvalMode(TrainingStep):
    def __call__(self):
        self.model.eval()
        return super().__call__()


class Trains(TrainingStep):
    """Time with a learning rate, so that each step starts from different weights."""

    def __init__(self, case, *, learning_rate=1e-3):
        super().__init__(case, learning_rate=learning_rate)


def leaves_a_seed(case, *args, **options):
    found = measure_levers(case, *args, **options)
    torch.manual_seed(0)
    return found


def all_that_ran(case, *args, **options):
    """Count recomputed FLOPs as the model's, which raises the utilisation."""
    found = measure_levers(case, *args, **options)
    for row in found.rows:
        row.model_flops = row.executed_flops
    return found


def one_microbatch(case, *args, **options):
    found = measure_levers(case, *args, **options)
    for row in found.rows:
        row.model_flops //= row.num_microbatches
    return found


def six_for_each_weight_and_row(case, *args, **options):
    """Count 6 FLOPs per weight and row, a rule of thumb that includes a gradient of the batch."""
    found = measure_levers(case, *args, **options)
    parameters = sum(
        parameter.numel() for parameter in case.build().parameters() if parameter.dim() > 1
    )
    for row in found.rows:
        row.model_flops = 6 * parameters * case.batch_size
    return found


def forward_alone(case, *args, **options):
    found = measure_levers(case, *args, **options)
    for row in found.rows:
        row.model_flops //= 3
    return found


def without_optimizer_state(case, *args, **options):
    found = measure_levers(case, *args, **options)
    for row in found.rows:
        row.peak_bytes -= 2 * bytes_on_device(case.build().parameters(), case.device)
    return found


def with_the_neighbours(case, *args, **options):
    """Return the allocator's figure, which includes the other configurations."""
    found = measure_levers(case, *args, **options)
    beside = bytes_on_device(case.build().parameters(), case.device)
    for row in found.rows:
        row.peak_bytes += beside
    return found


def plain_for_all(case, *args, **options):
    found = measure_levers(case, *args, **options)
    for row in found.rows:
        row.peak_bytes = found.plain.peak_bytes
    return found


def timing(way):
    """Return a benchmark that times `way(step)` in place of the step."""

    def measure(case, *args, **options):
        def replaced(self, row, step):
            return lambda: way(step)

        with mock.patch.object(report._LeverRun, "_way", replaced):
            return measure_levers(case, *args, **options)

    return measure


def forward_timed(step):
    return step.loss(step.model, step.window.microbatches[0])


def backward_timed(step):
    forward_timed(step).backward()


def half_timed(step):
    """Time the step of the first half of the batch."""
    first = step.window.microbatches[0]
    if len(step.window) == 1:
        first = take(first, slice(0, batch_size(first) // 2))
    half = replace(step.window, microbatches=(first,))
    return train_window(step.model, half, step.loss, step.optimizer)


def twice_timed(step):
    step()
    step()


def by_another_clock(case, *args, clock=None, **options):
    return measure_levers(case, *args, **options)


def peak_of_forward(case, *args, **options):
    def peak_bytes(self):
        return peak_of_step(lambda: forward_timed(self), self._there(), self.device)

    with mock.patch.object(TrainingStep, "peak_bytes", peak_bytes):
        return measure_levers(case, *args, **options)


def never_accumulated(text):
    return replace(find_lever(text), accumulate=1)


def plain_for_an_unknown_name(text):
    try:
        return find_lever(text)
    except ValueError:
        return replace(PLAIN_LEVER, name=text)


class WithoutState(TrainingStep):
    """Shares the weights, and steps with moments of its own."""

    def _share_state(self, like):
        return None


class CopiedWeights(TrainingStep):
    """Holds its own weights beside those of the step that it is like."""

    def __init__(self, case, *args, like=None, **options):
        super().__init__(case, *args, **options)


def with_the_first_step(case, change):
    """Count two steps, of which the first one does what happens only once."""
    return 2 * python_calls(case, change)


def of_the_change_alone(case, change):
    """Count the calls that a change adds."""
    return python_calls(case, change) - python_calls(case, lambda module, case: None)


FAULTS = [
    planted("bench.steps-share", "without-state", make=WithoutState, hint="moments shared"),
    planted("bench.steps-share", "copied", make=CopiedWeights, hint="weights shared"),
    planted("bench.python-calls", "first-step", calls=with_the_first_step, hint="are added"),
    planted("bench.python-calls", "difference", calls=of_the_change_alone, hint="three modules"),
    planted(
        "bench.levers", "never-accumulated", find=never_accumulated, hint="accumulate=4 is not"
    ),
    planted(
        "bench.wrong-levers",
        "plain-for-an-unknown-name",
        find=plain_for_an_unknown_name,
        hint="acumulate=4: ",
    ),
    planted("bench.clock", "without-waiting", time=without_waiting),
    planted("bench.clock", "waiting-before-alone", time=waiting_before_alone),
    planted("bench.turns", "one-after-the-other", time=one_after_the_other),
    planted("bench.turns", "ratio-of-means", ratio=ratio_of_means),
    planted("bench.spread", "warm-up-counted", time=warmup_counted),
    planted("bench.spread", "ends", summary=ends),
    planted("bench.interval", "one-standard-error", time=planted_times, ratio=one_standard_error),
    planted("bench.interval", "one-sided", time=planted_times, ratio=one_sided),
    planted("bench.difference", "never-certain", time=planted_times, ratio=never_certain),
    planted("bench.difference", "without-interval", time=planted_times, ratio=without_interval),
    planted("bench.training", "without-optimizer", make=WithoutOptimizer, model="dropout"),
    planted("bench.training", "gradients-kept", make=GradientsKept, model="dropout"),
    planted("bench.training", "eval-mode", make=InEvalMode, model="dropout"),
    planted("bench.training", "sum-not-mean", make=SumNotMean, hint="loss"),
    planted("bench.weights", "trains", make=Trains, model="dropout"),
    planted("bench.generators", "leaves-a-seed", measure=leaves_a_seed, hint="generator"),
    planted(
        "bench.timed-step",
        "forward-alone",
        measure=timing(forward_timed),
        hint="time the whole step",
    ),
    planted(
        "bench.timed-step",
        "without-optimizer",
        measure=timing(backward_timed),
        hint="time the whole step",
    ),
    planted(
        "bench.timed-step", "twice", measure=timing(twice_timed), hint="of 4 samples|whole step"
    ),
    planted("bench.timed-step", "another-clock", measure=by_another_clock, hint="read the clock"),
    planted("bench.timed-batch", "half", measure=timing(half_timed), hint="takes 2 of 4 samples"),
    planted("bench.model-flops", "one-microbatch", measure=one_microbatch),
    planted("bench.model-flops", "six-for-each-weight", measure=six_for_each_weight_and_row),
    planted("bench.model-flops", "forward-alone", measure=forward_alone),
    planted("bench.utilization", "all-that-ran", measure=all_that_ran),
    planted("bench.peak", "without-optimizer-state", measure=without_optimizer_state),
    planted("bench.peak", "with-the-neighbours", measure=with_the_neighbours),
    planted("bench.peak", "plain-for-all", measure=plain_for_all, model="transformer"),
    planted("bench.peak", "of-forward", measure=peak_of_forward, hint="wide layer"),
]
