"""A recomputed block repeats the choices of its router, whatever happened meanwhile.

python -m pytest tests/primitives/test_routing.py
"""

import contextlib
import copy

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from curry_train.core.generators import seeded
from curry_train.primitives import (
    CheckpointConfig,
    apply_config,
    apply_sac,
    keep_routing,
    recompute_blocks,
    recompute_segments,
)
from curry_train.primitives.routing import has_router, routed_contexts

from ..saboteurs.faulty_routing import EXPERTS, WIDTH, Experts, Router
from ..toy_steps import activated, all_equal, drawn, gradients_of, square_sum, stacked

TOKENS = 12


class OtherKernel:
    """Rounds scores otherwise while it is on, by which ties part."""

    seed = None

    @classmethod
    def round(cls, scores):
        if cls.seed is not None:
            noise = numpy.random.default_rng(cls.seed).random(scores.shape, dtype=numpy.float32)
            # No operation of torch, so no mode sees it.
            scores.detach().numpy()[...] += 1e-6 * noise
        return scores

    @classmethod
    @contextlib.contextmanager
    def on(cls, seed):
        cls.seed = seed
        yield
        cls.seed = None


class SharpRouter(Router):
    """Choose two experts by the largest scores themselves."""

    def forward(self, x):
        return torch.topk(OtherKernel.round(torch.softmax(self.score(x), -1)), 2, dim=-1)


def test_a_router_is_known_by_its_attribute_alone():
    assert has_router(nn.ModuleDict({"router": nn.Linear(2, 2)}))
    assert not has_router(nn.Linear(2, 2))


def step_of(model, batch, during=None):
    loss = square_sum(model, batch)
    with during or contextlib.nullcontext():
        loss.backward()
    return [loss.detach(), *gradients_of(model)]


def example(seed, **options):
    """Return a model whose experts have equal scores, and a batch."""
    with seeded(seed):
        model = stacked(lambda: Experts(**options), 3)
        for block in model:
            nn.init.ones_(block.router.score.weight)
        return model, torch.randn(TOKENS, WIDTH)


TECHNIQUES = {
    "blocks": recompute_blocks,
    "segments": lambda model: recompute_segments(model, 2),
    "sac": lambda model: apply_sac(model, ["aten.mm", "aten.bmm"]),
    "configured": lambda model: apply_config(
        model, CheckpointConfig(enabled=True, strategy="full")
    ),
}


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("seed", range(2))
def test_another_kernel_in_backward_changes_no_gradient(technique, seed):
    """Without the choices that were kept, tied scores take other experts."""
    model, batch = example(seed, router=SharpRouter)
    left_alone = copy.deepcopy(model)
    kept = copy.deepcopy(model)
    recompute_blocks(left_alone)
    TECHNIQUES[technique](kept)
    keep_routing(kept)

    expected = step_of(model, batch)
    assert all_equal(step_of(kept, batch, during=OtherKernel.on(seed)), expected)
    assert not all_equal(step_of(left_alone, batch, during=OtherKernel.on(seed)), expected)


def test_a_second_backward_repeats_the_same_choices():
    model, batch = example(2)
    other = copy.deepcopy(model)
    recompute_blocks(other)
    keep_routing(other)
    expected = step_of(model, batch)[1:]

    loss = square_sum(other, batch)
    loss.backward(retain_graph=True)
    # In place between forward and backward, as balancing without a loss does.
    for block in other:
        block.router.bias += drawn(EXPERTS, seed=5)
    loss.backward()
    assert all_equal(gradients_of(other), [2 * gradient for gradient in expected])


@pytest.mark.filterwarnings("ignore")
def test_other_models_are_left_as_they_are():
    model = stacked(lambda: activated(4, nn.Tanh), 3)
    recompute_blocks(model)
    assert keep_routing(model) == []
    assert keep_routing(model, blocks="1") == ["1"]
    model.compile(backend="aot_eager")
    model(torch.ones(2, 4)).sum().backward()


def test_another_way_in_the_second_run_raises():
    _, second = routed_contexts(noop_context_fn())
    with second, pytest.raises(RuntimeError, match="topk where the first one did not"):
        torch.topk(torch.ones(3), 1)


def test_contexts_need_plain_recompute():
    model, _ = example(0)
    recompute_blocks(model, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant"):
        keep_routing(model)


@pytest.mark.parametrize("name", ["TopNGating", "TopKGate", "NoisyTopkRouter", "MoEGate"])
def test_a_gate_that_recomputes_alone_is_found_by_the_name_of_its_class(name):
    gate = type(name, (SharpRouter,), {})()
    model = nn.ModuleDict({"gate": gate, "experts": nn.Linear(WIDTH, WIDTH)})
    recompute_blocks(model, blocks="gate")
    assert keep_routing(model) == ["gate"]
