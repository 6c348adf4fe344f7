"""Tests of the planner's gates: right plans hold, wrong plans and estimates fail.

python -m pytest tests/gates/test_memory_plan_fit.py
"""

from dataclasses import dataclass, replace

import pytest
from plan_models import ROUTED

from curry_train.gates import memory_plan
from curry_train.plan.estimate import Sketch
from curry_train.plan.saved import NONE_KIND, Option, Plan
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload
from curry_train.workloads.workload import Case

CASES = {
    name: Case(load_workload(name)) for name in BUILTIN_WORKLOADS
}  # each is prepared once for all tests
CASE = CASES["transformer"]


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_the_estimate_is_the_measured_peak_to_the_byte(name):
    verdict = memory_plan.estimate(CASES[name])
    assert verdict.passed, verdict
    assert "full" in verdict.measured


def test_a_model_whose_shapes_need_values_has_no_estimate():
    verdict = memory_plan.estimate(Case(ROUTED))
    assert verdict.passed is None
    assert "nonzero" in verdict.hint
    assert "Routed" in verdict.hint


def forgets_what_was_applied(case):
    peaks = memory_plan.prepared(case).peaks
    return dict.fromkeys(peaks, peaks[memory_plan.PLAIN_VARIANT])


def forgets_the_optimizers_state(case):
    state = 2 * sum(parameter.nbytes for parameter in case.build().parameters())
    return {way: peak - state for way, peak in memory_plan.prepared(case).peaks.items()}


def is_for_another_batch(case):
    with Sketch(case.workload) as sketch:
        return memory_plan.predicted_peaks(sketch, case.batch_size + 1)


def is_too_small_by_a_number(case):
    peaks = memory_plan.prepared(case).peaks
    return peaks | {memory_plan.ALTERNATING_VARIANT: peaks[memory_plan.ALTERNATING_VARIANT] - 4}


@pytest.mark.parametrize(
    "wrong",
    [
        forgets_what_was_applied,
        forgets_the_optimizers_state,
        is_for_another_batch,
        is_too_small_by_a_number,
    ],
    ids=lambda f: f.__name__,
)
def test_a_wrong_estimate_fails(wrong):
    verdict = memory_plan.estimate(CASE, predict=wrong)
    assert verdict.passed is False
    assert "an owner is missing" in verdict.hint


def test_a_plan_fits_as_predicted_and_trains_the_same():
    found = memory_plan.fits(CASE), memory_plan.plan_parity(CASE)
    assert all(verdict.passed for verdict in found), found


def test_a_model_whose_peak_recompute_can_not_lower_has_no_plan():
    for check in (memory_plan.fits, memory_plan.plan_parity):
        verdict = check(CASES["mlp"])  # a model whose peak is in the optimizer's step
        assert verdict.passed is None
        assert "does not lower the peak" in verdict.hint


def does_nothing(case):
    plan = memory_plan.planned(case)
    return replace(plan, options=dict.fromkeys(plan.options, Option(NONE_KIND)))


def promises_less(case):
    plan = memory_plan.planned(case)
    return replace(plan, peak_bytes=plan.peak_bytes - 4096)


def is_over_the_budget(case):
    plan = memory_plan.planned(case)
    return replace(plan, budget_bytes=plan.peak_bytes - 1)


@pytest.mark.parametrize(
    "wrong", [does_nothing, promises_less, is_over_the_budget], ids=lambda f: f.__name__
)
def test_a_wrong_plan_does_not_fit(wrong):
    assert memory_plan.fits(CASE, make=wrong).passed is False


@dataclass(frozen=True)
class Detaching(Plan):
    """A plan that cuts the first block off the graph."""

    def apply(self, model):
        model.layers[0].register_forward_hook(lambda module, args, output: output.detach())
        return super().apply(model)


@dataclass(frozen=True)
class NotApplied(Plan):
    """A plan that reports changes without making them."""

    def apply(self, model):
        return list(self.options)


@pytest.mark.parametrize("kind", [Detaching, NotApplied])
def test_a_plan_that_trains_another_model_or_does_nothing_fails_parity(kind):
    def make(case):
        return kind(**vars(memory_plan.planned(case)))

    assert memory_plan.plan_parity(CASE, make=make).passed is False
