"""Parity names every difference between two steps.

python -m pytest tests/core/test_parity.py
"""

import random
from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn

from curry_train.core.generators import seeded
from curry_train.core.parity import NothingToCompare, check_comparable, compare, record_step

from ..toy_steps import square_sum


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@pytest.fixture
def step():
    torch.manual_seed(0)
    return record_step(Model(), torch.randn(6, 4), square_sum)


def test_parameters_without_a_gradient_are_listed(step):
    parity = compare(step, step)
    assert parity.without_gradient == ("unused.weight", "unused.bias")
    assert "no gradient: unused.weight, unused.bias" in parity.describe()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("last.weight", lambda gradient: None),
        ("last.weight", lambda gradient: gradient.reshape(8, 1)),
        ("last.weight", torch.Tensor.double),
        ("last.weight", lambda gradient: gradient * float("nan")),
        ("unused.bias", lambda gradient: torch.zeros(2)),
        ("extra", lambda gradient: torch.ones(1)),
    ],
)
def test_a_missing_or_malformed_gradient_differs_at_any_tolerance(step, name, change):
    gradients = step.gradients | {name: change(step.gradients.get(name))}
    other = replace(step, gradients=gradients)
    for pair in ((step, other), (other, step)):
        parity = compare(*pair, tolerance=1e9)
        assert len(parity.differences) == 1
        assert "differs in kind" in parity.describe()


@pytest.mark.parametrize(
    ("name", "draw"),
    [("torch", lambda: torch.rand(1)), ("python", random.random), ("numpy", numpy.random.rand)],
)
def test_an_extra_random_number_is_named(name, draw):
    def run(extra):
        with seeded(0):
            model = Model()
            batch = torch.randn(6, 4)
            if extra:
                draw()
            return record_step(model, batch, square_sum)

    parity = compare(run(False), run(True), tolerance=1.0)
    assert [str(found) for found in parity.differences] == [f"generator {name}: differs in kind"]


def test_rounding_of_a_gradient_that_is_zero_is_not_a_difference(step):
    # The exact gradient of a bias before BatchNorm is zero, so the computed one is rounding.
    noise = step.gradients["first.bias"]
    assert noise.abs().max() < 1e-5
    off = dict(step.gradients) | {"first.bias": -noise}
    assert compare(step, replace(step, gradients=off), tolerance=1e-4).holds
    wrong = dict(step.gradients) | {"first.bias": noise + step.gradients["last.weight"].norm()}
    assert not compare(step, replace(step, gradients=wrong), tolerance=1e-4).holds


def test_imaginary_parts_count_within_a_tolerance():
    def step_with(factor):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        return record_step(model, torch.ones(4), lambda one, x: (one.weight * factor).abs().sum())

    reference = step_with(1.0)
    (gradient,) = reference.gradients.values()
    turned = replace(reference, gradients={"weight": gradient + 0.5j})
    (difference,) = compare(reference, turned, tolerance=0.1).differences
    assert difference.error == pytest.approx(0.5)
    assert compare(reference, step_with(1.01), tolerance=0.1).holds


@pytest.mark.parametrize("scale", [0.0, None])
def test_gradients_of_zeros_and_none_at_all_can_not_be_compared(scale):
    def loss(module, batch):
        value = module(batch).sum()
        return value.detach() if scale is None else value * scale

    with pytest.raises(NothingToCompare, match="below the rounding"):
        check_comparable(record_step(nn.Linear(8, 8), torch.randn(2, 8), loss))
