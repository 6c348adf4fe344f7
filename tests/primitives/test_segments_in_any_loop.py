"""A segment computes the same as the loop around it, or raises ChainBroken.

python -m pytest tests/primitives/test_segments_in_any_loop.py
"""

import weakref

import pytest
import torch
from torch import nn

from curry_train.primitives import ChainBroken, recompute_segments, remove_segments

from ..plan_models import Runs, in_turn
from ..toy_steps import activated, all_equal, stacked


def chain(loop, block=lambda: activated(8)):
    """Return a model of eight blocks, called by a loop that the test chooses."""
    torch.manual_seed(0)
    return Runs(loop, *(block() for _ in range(8)))


def runs_twice(layers, x):
    return in_turn(layers, in_turn(layers, x))


def adds_between(layers, x):
    for layer in layers:
        x = layer(x) * 0.5
    return x


def looks_between(layers, x):
    total = 0
    for layer in layers:
        x = layer(x)
        total = total + x.square()
    return x + total


def drops_a_block(layers, x):
    for number, layer in enumerate(layers):
        if number != 1:
            x = layer(x)
    return x


def leaves_early(layers, x):
    for layer in layers[:2]:
        x = layer(x)
    return x.square()


def draws_between(layers, x):
    for layer in layers:
        torch.rand(())
        x = layer(x)
    return x


def calls_a_block_twice(layers, x):
    for layer in layers:
        x = layer(x)
        if layer is layers[1]:
            x = layer(x)
    return x


def collects_hidden_states(layers, x):
    hidden = []
    for layer in layers:
        x = layer(x)
        hidden.append(x)
    return torch.stack(hidden).mean(0)


def gradients(model, x):
    """Return the gradients, with zeros for blocks that did not run."""
    model.zero_grad()
    model(x).square().sum().backward()
    zeros = [torch.zeros_like(parameter) for parameter in model.parameters()]
    pairs = zip(model.parameters(), zeros, strict=True)
    return [zero if parameter.grad is None else parameter.grad for parameter, zero in pairs]


@pytest.mark.parametrize("loop", [in_turn, runs_twice, leaves_early, collects_hidden_states])
@pytest.mark.parametrize(("num_segments", "num_blocks"), [(1, 0), (2, 4), (3, 6), (8, 7)])
def test_a_chain_trains_the_same_and_the_last_of_several_segments_is_kept(
    loop, num_segments, num_blocks
):
    model = chain(loop).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    expected = gradients(model, x)
    names = [f"inner.{index}" for index in range(num_blocks)]
    assert recompute_segments(model, num_segments) == names
    assert all_equal(gradients(model, x), expected)
    remove_segments(model)
    assert {type(layer) for layer in model.inner} == {nn.Sequential}


@pytest.mark.parametrize(
    "loop", [adds_between, looks_between, drops_a_block, draws_between, calls_a_block_twice]
)
def test_a_loop_that_is_not_a_chain_is_refused_with_the_block(loop):
    model = chain(loop)
    x = torch.randn(4, 8)
    expected = gradients(model, x)
    recompute_segments(model, 2)
    with pytest.raises(ChainBroken, match=r"inner\.\d"):
        gradients(model, x)
    with torch.no_grad():
        assert model(x).shape == (4, 8)
    model.run = in_turn
    gradients(model, x)
    # A segment of one block is right in any loop.
    model = chain(loop)
    recompute_segments(model, 8)
    assert all_equal(gradients(model, x), expected)


MASK = torch.linspace(0.5, 1.5, 8)[:, None]


def masked():
    """Return a block with a second argument, and a gradient that forward itself takes."""

    def run(inner, x, mask=1.0):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(inner[0](place).square().sum(), place)
        return torch.tanh(inner[0](x)) * mask + slope

    return Runs(run, nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        # Each slice is an object of its own, of the same memory.
        (lambda index: [MASK[:4]], False),
        (lambda index: [], False),
        (lambda index: [MASK[4 * (index % 2) :][:4]], True),
        (lambda index: [1.0 + index], True),
    ],
    ids=["same slice", "none", "other slice", "other number"],
)
def test_arguments_that_a_segment_passes_on_must_be_the_same(arguments, refused):
    def loop(layers, x):
        for index, layer in enumerate(layers):
            x = layer(x, *arguments(index))
        return x

    model = chain(loop, masked)
    x = torch.randn(4, 8)
    expected = gradients(model, x)
    recompute_segments(model, 2)
    if refused:
        with pytest.raises(ChainBroken, match=r"inner\.1 takes other arguments than inner\.0"):
            gradients(model, x)
    else:
        assert all_equal(gradients(model, x), expected)


def test_a_block_that_looks_up_what_the_first_one_is_not_given_is_refused():
    def loop(layers, x):
        for layer in layers:
            x = layer(x, {id(layer.inner): 0.5})
        return x

    def run(inner, x, scales):
        return inner[0](x) * scales[id(inner)]

    model = chain(loop, lambda: Runs(run, nn.Linear(8, 8)))
    recompute_segments(model, 2)
    with pytest.raises(ChainBroken, match=r"inner\.1 can't take"):
        model(torch.randn(4, 8))


def test_nothing_of_a_forward_stays_alive_behind_it():
    def loop(layers, x):
        mask = torch.ones(4, 8)
        masks.append(weakref.ref(mask))
        for layer in layers:
            x = layer(x, mask)
        return x

    masks = []
    model = chain(loop, masked)
    recompute_segments(model, 2)
    output = model(torch.randn(4, 8))
    seen = weakref.ref(output)
    del output
    assert seen() is None
    assert masks[0]() is None


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ZeroDivisionError("of the second block"), 2),
        (torch.OutOfMemoryError("of the second block"), 2),
        (RuntimeError("of the second run"), 5),
    ],
)
def test_an_error_of_a_block_stays_its_own_and_the_next_forward_is_sound(error, call):
    calls = []

    def run(inner, x):
        calls.append(None)
        if len(calls) == call:
            raise error
        return inner[0](x).tanh()

    model = stacked(lambda: Runs(run, nn.Linear(8, 8)), 4)
    x = torch.randn(4, 8)
    recompute_segments(model, 2)
    with pytest.raises(type(error)) as raised:
        model(x).square().sum().backward()
    assert raised.value is error
    found = gradients(model, x)
    remove_segments(model)
    assert all_equal(gradients(model, x), found)
