"""Tests of the benchmark gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_bench.py
"""

import itertools
import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

from curry_train.bench.report import measure_levers
from curry_train.bench.steps import TrainingStep
from curry_train.core.measure import bytes_on_device
from curry_train.core.timing import Ratio, Spread, paired_ratio, time_in_turns
from curry_train.gates import bench
from curry_train.gates.verdict import NotApplicable
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

GATES = [*bench.BENCH_TIMING_GATES, *bench.BENCH_FIGURE_GATES]
SMALL = transformer(depth=2, dim=32, length=16, vocabulary=64)
DROPOUT = transformer(depth=2, dim=32, length=8, vocabulary=64, dropout=0.2)
FLAT = Workload(
    "flat",
    lambda: nn.Linear(8, 8),
    lambda size: torch.randn(size, 8),
    lambda module, batch: module(batch).sum(),
)
ELEMENTWISE = replace(FLAT, name="elementwise", build=lambda: nn.LayerNorm(8))


CHECKS = {gate.name: gate.check for gate in GATES}


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, gate):
    verdict = gate.run(Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype, gate):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    verdict = gate.run(Case(DROPOUT, device=torch.device(device), dtype=dtype))
    assert verdict.passed, verdict


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_gates_hold_on_a_model_without_blocks_and_on_one_sample(gate):
    verdict = gate.run(Case(FLAT, batch_size=1))
    assert verdict.passed, verdict


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_gates_do_not_fail_on_a_model_without_products(gate):
    verdict = gate.run(Case(ELEMENTWISE))
    assert verdict.passed is (None if gate.name == "bench/flops" else True), verdict


# Saboteurs of the timing.


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


class Dropping(nn.Module):
    """Runs each layer with a probability of a half."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                x = x + layer(x)
        return x + self.layers[0](x)


class Decomposed(nn.Module):
    """Multiplies two weights in each forward, whatever the batch."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 4))
        self.down = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return x @ (self.up @ self.down)


def workload_of(kind):
    return Workload(
        kind.__name__, kind, lambda size: torch.randn(size, 8), lambda m, x: m(x).square().sum()
    )


def test_gates_say_where_steps_differ_in_work():
    with pytest.raises(NotApplicable, match="FLOPs, as where layers are dropped at random"):
        CHECKS["bench/twice"](Case(workload_of(Dropping)))


def test_products_of_weights_alone_run_in_each_microbatch():
    verdict = CHECKS["bench/flops"](Case(workload_of(Decomposed)))
    assert verdict.passed, verdict


def test_every_wrong_way_to_time_is_caught_on_the_simulated_machine():
    case = Case(SMALL)
    for time in (without_waiting, waiting_before_alone, one_after_the_other, warmup_counted):
        verdict = bench.twice(case, time=time)
        assert verdict.passed is False, (time, verdict)
    assert bench.twice(case, ratio=ratio_of_means).passed is False
    assert bench.twice(case, summary=ends).passed is False


def planted(ways, *, rounds, **options):
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


@pytest.mark.parametrize("ratio", [one_standard_error, never_certain, without_interval, one_sided])
def test_intervals_that_are_too_narrow_too_wide_or_missing_are_caught(ratio):
    assert bench.step_against_itself(Case(SMALL), time=planted).passed
    verdict = bench.step_against_itself(Case(SMALL), time=planted, ratio=ratio)
    assert verdict.passed is False, verdict


# Saboteurs of the step.


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


@pytest.mark.parametrize("make", [WithoutOptimizer, GradientsKept, InEvalMode, Trains])
def test_a_step_that_differs_from_the_training_is_caught(make):
    verdict = bench.whole_step(Case(DROPOUT), make=make)
    assert verdict.passed is False, verdict


def test_a_scaled_loss_that_adamw_hides_is_caught_by_its_value():
    verdict = bench.whole_step(Case(SMALL), make=SumNotMean)
    assert verdict.passed is False, verdict
    assert "loss" in verdict.measured


def test_generators_that_are_left_seeded_are_caught():
    verdict = bench.whole_step(Case(SMALL), measure=leaves_a_seed)
    assert verdict.passed is False
    assert "generator" in verdict.measured


# Saboteurs of the figures.


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


@pytest.mark.parametrize(
    "measure", [all_that_ran, one_microbatch, six_for_each_weight_and_row, forward_alone]
)
def test_wrong_flops_are_caught(measure):
    verdict = bench.bench_flops(Case(SMALL), measure=measure)
    assert verdict.passed is False, verdict


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


@pytest.mark.parametrize("measure", [without_optimizer_state, with_the_neighbours, plain_for_all])
def test_wrong_peaks_are_caught(measure):
    verdict = bench.peak(Case(SMALL), measure=measure)
    assert verdict.passed is False, verdict
