"""A step in backward trains as a step after it, where that is possible.

python -m pytest tests/primitives/test_step_in_backward.py
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from curry_train.primitives import (
    GradientAccumulation,
    NonFiniteWindow,
    StepInBackward,
    train_window,
)

from ..toy_steps import all_equal, drawn, square_sum

ADAM = partial(torch.optim.AdamW, lr=1e-2)


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    layers[2].weight = layers[0].weight  # tied: its gradient is complete after both
    return nn.Sequential(*layers)


def stepping():
    """Return a model, and the optimizer that steps inside of its backward."""
    module = model()
    return module, StepInBackward(module.parameters(), ADAM)


def microbatches(count=6):
    return [*drawn(count, 3, 4)]


def train(module, optimizer, steps=2, *, data=None, **options):
    return [
        train_window(module, window, square_sum, optimizer, **options)
        for window in GradientAccumulation(steps).windows(data or microbatches(), count=len)
    ]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_windows_train_the_same(steps):
    after, during = model(), model()
    plain = ADAM(after.parameters())
    num_gradients = []
    for one in during.parameters():
        one.register_post_accumulate_grad_hook(
            lambda _: num_gradients.append(sum(p.grad is not None for p in during.parameters()))
        )
    # The hooks above run before its own, which free a gradient.
    optimizer = StepInBackward(during.parameters(), ADAM)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.1) for one in (plain, optimizer)]
    expected = train(after, plain, steps, scheduler=schedules[0])
    found = train(during, optimizer, steps, scheduler=schedules[1])
    assert [one.loss for one in found] == [one.loss for one in expected]
    assert all_equal(during.parameters(), after.parameters())
    assert all(parameter.grad is None for parameter in during.parameters())
    assert steps > 1 or max(num_gradients) == 1


def test_what_got_its_gradient_in_a_pause_steps_in_the_step():
    """As a layer that only an earlier microbatch of a window uses."""
    after, (during, optimizer) = model(), stepping()
    (data,) = microbatches(1)
    square_sum(after, data).backward()
    ADAM(after.parameters()).step()
    with optimizer.paused():
        square_sum(during, data).backward()
    optimizer.step()
    assert all_equal(during.parameters(), after.parameters())


def train_with_state(optimizer, module):
    other = copy.deepcopy(module)
    loaded = StepInBackward(other.parameters(), ADAM)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, loaded)
    return other


def train_copy(optimizer, module):
    copied, other = copy.deepcopy((optimizer, module))
    copied.attach()
    train(other, copied)
    return other


def train_copy_for_copied_model(optimizer, module):
    other = copy.deepcopy(module)
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    copied = copy.deepcopy(optimizer, {id(one): new for one, new in pairs})
    copied.attach()
    train(other, copied)
    return other


@pytest.mark.parametrize("train_one", [train_with_state, train_copy, train_copy_for_copied_model])
def test_a_state_dict_and_a_copy_go_on_with_its_own_weights_and_state(train_one):
    module, optimizer = stepping()
    train(module, optimizer)
    before = [one.clone() for one in module.parameters()]
    other = train_one(optimizer, module)
    assert all_equal(module.parameters(), before)
    train(module, optimizer)
    assert all_equal(module.parameters(), other.parameters())


def test_a_pause_does_not_let_a_copy_step_in_backward():
    module, optimizer = copy.deepcopy(stepping())
    with optimizer.paused():
        pass
    square_sum(module, microbatches(1)[0]).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 1.0}, {"scaler": torch.amp.GradScaler("cpu")}, {"joint_loss": sum}],
)
def test_what_needs_all_gradients_first_is_refused(options):
    """With a global clip each parameter would step before the norm is known."""
    module, optimizer = stepping()
    before = model()
    message = (
        f"{next(iter(options))} needs all gradients before the first step, and StepInBackward has "
        "stepped by then: leave it out, or give the optimizer itself"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        train(module, optimizer, **options)
    assert all_equal(module.parameters(), before.parameters())


def test_a_loss_that_is_not_finite_changes_no_weight():
    module, optimizer = stepping()
    before = model()
    bad = [*microbatches(1), torch.full((3, 4), torch.nan)]
    with pytest.raises(NonFiniteWindow, match=r"loss nan, gradient norm nan; .* microbatch 1 of 2"):
        train(module, optimizer, data=bad)
    assert all_equal(module.parameters(), before.parameters())


def test_two_ranks_would_step_before_they_agree(pair_of_four_ranks, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    with pytest.raises(
        ValueError,
        match=r"^StepInBackward steps before the ranks have agreed on a gradient: give the "
        "optimizer itself$",
    ):
        train(*stepping())
