"""A model, its gradients and the random generators before and after a measurement."""

import contextlib
import copy
import random

import torch

from .toy_steps import gradients_of


@contextlib.contextmanager
def unchanged(model):
    """Require that a measurement leaves weights, buffers, gradients, modes, hooks, generators."""
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    gradients = gradients_of(model)
    before = copy.deepcopy([model.state_dict(), gradients])
    modes = [one.training for one in model.modules()]
    generators = torch.get_rng_state(), random.getstate()
    yield
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert [one.training for one in model.modules()] == modes
    assert all(one.grad is kept for one, kept in zip(model.parameters(), gradients, strict=True))
    torch.testing.assert_close([model.state_dict(), gradients], before, rtol=0, atol=0)
    for one in model.modules():
        assert {*one._forward_hooks, *one._forward_pre_hooks} | vars(one).keys() & {
            "forward"
        } == set()
