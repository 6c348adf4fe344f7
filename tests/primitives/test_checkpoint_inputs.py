"""A tensor passed into a recomputed call and then overwritten is refused, as torch does.

python -m pytest tests/primitives/test_checkpoint_inputs.py
"""

import collections
import copy
import dataclasses

import pytest
import torch
from torch import nn

from curry_train.primitives import (
    apply_sac,
    checkpoint_timesteps,
    recompute_blocks,
    recompute_segments,
)

from ..plan_models import Runs
from ..toy_steps import all_equal, drawn, gradients_of

WRITTEN = "modified by an inplace operation"


@dataclasses.dataclass
class Context:
    mask: object
    unset: object = dataclasses.field(init=False)


Pair = collections.namedtuple("Pair", "mask other")
CONTAINERS = {
    "bare": lambda mask: mask,
    "named tuple": lambda mask: Pair(mask, None),
    "deep": lambda mask: {"one": [({"two": mask},)]},
    "dataclass in a list in a dataclass": lambda mask: Context([Context(mask)]),
}
CHANGES = {
    "full": recompute_blocks,
    "reentrant": lambda model: recompute_blocks(model, use_reentrant=True),
    "segments": lambda model: recompute_segments(model, 2),
    "sac": lambda model: apply_sac(model, "save_matmuls"),
}


def mask_of(given):
    while not isinstance(given, torch.Tensor):
        given = (
            given.mask
            if hasattr(given, "mask")
            else next(iter(given.values() if isinstance(given, dict) else given))
        )
    return given


def block():
    """Return a block whose mask plain autograd does not keep."""
    return Runs(lambda inner, x, mask: inner[0](torch.tanh(x) + mask_of(mask)), nn.Linear(16, 16))


def run(layers, x, mask, *, named):
    for layer in layers:
        x = layer(x, mask=mask) if named else layer(x, mask)
    return x


def gradients(model, mask, container, *, named, overwritten):
    x = drawn(4, 16).requires_grad_()
    out = model(x, container(mask), named=named)
    if overwritten:
        mask.zero_()
    out.square().sum().backward()
    return [x.grad, *gradients_of(model)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Runs(run, block(), block(), block())


MASK = torch.full((4, 16), 2.0)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_an_input_overwritten_between_forward_and_backward_is_refused(
    model, change, named, container
):
    def run(overwritten):
        copied = copy.deepcopy(model)
        form = CONTAINERS[container]
        return gradients(copied, MASK.clone(), form, named=named, overwritten=overwritten)

    plain = run(False)
    assert all_equal(plain, run(True))  # the plain model accepts it
    CHANGES[change](model)
    assert all_equal(plain, run(False))
    with pytest.raises(RuntimeError, match=WRITTEN):
        run(True)


@pytest.mark.parametrize(
    "form",
    [lambda x: x, list, lambda x: [{"x": step} for step in x]],
    ids=["tensor", "list", "dicts"],
)
def test_overwritten_inputs_of_timesteps_are_refused(form):
    linear, x = nn.Linear(4, 4), torch.ones(12, 3, 4)

    def step(x_t, state):
        state = torch.tanh(linear(torch.tanh(x_t["x"] if isinstance(x_t, dict) else x_t)) + state)
        return state, state

    losses = [
        checkpoint_timesteps(step, form(x), torch.zeros(3, 4), chunk_size=3)[0].sum()
        for _ in range(2)
    ]
    losses[0].backward()
    x.zero_()
    with pytest.raises(RuntimeError, match=WRITTEN):
        losses[1].backward()


def test_an_overwritten_input_is_refused_in_a_compiled_model(model):
    recompute_blocks(model)
    run = torch.compile(model, backend="aot_eager")
    for container in (CONTAINERS["bare"], CONTAINERS["deep"]):
        gradients(run, MASK.clone(), container, named=True, overwritten=False)
        with pytest.raises(RuntimeError, match=WRITTEN):
            gradients(run, MASK.clone(), container, named=True, overwritten=True)


def test_a_tensor_of_inference_mode_is_accepted_as_without_recompute(model):
    with torch.inference_mode():
        mask = torch.ones(4, 16)
    recompute_blocks(model)
    for named in (True, False):
        for container in CONTAINERS.values():
            gradients(model, mask, container, named=named, overwritten=False)
