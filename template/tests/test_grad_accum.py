"""Tests of gradient accumulation; torch and pytest are all they need.

Sums over microbatches are added in another order than in one batch, so gradients are compared in
float64 with a relative tolerance of 1e-12, a few thousand times its rounding error.
"""

import copy

import pytest
import torch
from torch import nn

from curry_train.primitives.grad_accum import GradientAccumulation, NonFiniteWindow, train_window

LENGTHS = (7, 1, 4, 12, 3, 9, 2)  # valid tokens of each microbatch


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5)).double()


def make_microbatches():
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(length, 6, dtype=torch.float64, generator=generator),
            torch.randint(5, (length,), generator=generator),
        )
        for length in LENGTHS
    ]


def summed_loss(model, microbatch):
    inputs, targets = microbatch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="sum")


def num_tokens(microbatch):
    return len(microbatch[1])


def large_batch_gradients(model, microbatches):
    inputs, targets = (torch.cat(tensors) for tensors in zip(*microbatches, strict=True))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


def windows_of(microbatches, steps):
    return list(GradientAccumulation(steps).windows(microbatches, count=num_tokens))


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_every_window_has_the_gradients_of_its_large_batch(steps):
    model = make_model()
    windows = windows_of(make_microbatches(), steps)
    assert sum(len(window) for window in windows) == len(LENGTHS)
    for window in windows:
        assert window.train_step_kwargs(0)["loss_divisor"] == sum(map(num_tokens, window))
        expected = large_batch_gradients(make_model(), window.microbatches)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        result = train_window(model, window, summed_loss, optimizer)
        assert result.num_terms == sum(map(num_tokens, window))
        gradients = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-15)


def test_clipping_stepping_and_scheduling_happen_once_per_window():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for window in windows_of(make_microbatches(), 3):
        by_hand = copy.deepcopy(model)
        assert large_batch_gradients(by_hand, window.microbatches)
        norm = nn.utils.clip_grad_norm_(by_hand.parameters(), 0.01)
        torch.optim.SGD(by_hand.parameters(), lr=optimizer.param_groups[0]["lr"]).step()

        result = train_window(
            model, window, summed_loss, optimizer, clip_norm=0.01, scheduler=scheduler
        )
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        torch.testing.assert_close(model.state_dict(), by_hand.state_dict(), rtol=1e-12, atol=1e-15)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def loss_with_an_infinite_slope(model, microbatch):
    return summed_loss(model, microbatch) + (next(model.parameters()).sum() * 0).abs().sqrt()


@pytest.mark.parametrize(
    ("loss", "bad", "cause"),
    [
        (summed_loss, float("nan"), "loss .* not finite: microbatch 0, 1 of 2"),
        (
            loss_with_an_infinite_slope,
            1.0,
            r"loss \d\S+, gradient norm nan; not finite: no loss of this rank",
        ),
    ],
)
def test_a_loss_or_a_gradient_that_is_not_finite_changes_no_weight(loss, bad, cause):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    microbatches = make_microbatches()[:4]
    microbatches[2][0][0, 0] = microbatches[3][0][0, 0] = bad
    _, window = windows_of(microbatches, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NonFiniteWindow, match=f"^window 1: {cause}. The weights were not changed"):
        train_window(model, window, loss, optimizer)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("number", [-1, True, 2.5, None, "4", torch.tensor(2.0)])
def test_what_is_no_whole_number_is_refused(number):
    with pytest.raises(ValueError, match=r"^steps must be a whole number of at least 1, got"):
        GradientAccumulation(steps=number)
    with pytest.raises(
        ValueError, match=r"^count.microbatch. must be a whole number of at least 0, got"
    ):
        list(GradientAccumulation(2).windows([1, 2], count=lambda _: number))


def test_a_number_of_a_library_becomes_one_of_python():
    assert type(GradientAccumulation(torch.tensor(2)).steps) is int


def test_useless_settings_and_data_are_refused():
    with pytest.raises(ValueError, match=r"^steps must be a whole number of at least 1, got 0$"):
        GradientAccumulation(steps=0)
    with pytest.raises(
        ValueError, match=r"^there is no microbatch to train on: the data are empty$"
    ):
        list(GradientAccumulation(2).windows([]))
    with pytest.raises(
        ValueError,
        match=r"^window 0: none of its 2 microbatches has a valid term .count returned 0 for "
        "each., so there is nothing to divide by; drop such samples before batching, or use larger "
        "windows$",
    ):
        list(GradientAccumulation(2).windows(make_microbatches(), count=lambda microbatch: 0))
    model = make_model()
    (window,) = windows_of(make_microbatches()[:1], 1)
    message = "^the loss must be a tensor of one number, the sum over its terms; got "
    optimizer = torch.optim.SGD(model.parameters())
    for loss, got in (
        (lambda module, batch: module(batch[0]), r"shape \(7, 5\)$"),
        (lambda *_: 1.5, "float$"),
    ):
        with pytest.raises(ValueError, match=message + got):
            train_window(model, window, loss, optimizer)


def test_a_configuration_gives_the_number_of_steps():
    configured = {"gradient_accumulation_steps": 4}
    assert GradientAccumulation.from_config(configured) == GradientAccumulation(4)
    assert not GradientAccumulation.from_config({}).enabled


def test_the_first_and_the_last_microbatch_of_a_window_are_named():
    accumulation = GradientAccumulation(3)
    for index in range(4):
        is_first, is_last = index in (0, 3), index == 2
        assert (accumulation.is_first(index), accumulation.is_last(index)) == (is_first, is_last)
        decided = dict.fromkeys(("sync_gradients", "step_optimizer", "collect_metrics"), is_last)
        decided |= {"zero_grad": is_first, "loss_divisor": 3.0}
        assert accumulation.train_step_kwargs(index) == decided
