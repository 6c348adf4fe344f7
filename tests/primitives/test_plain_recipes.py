"""The recipes in plain torch of the skills give what the techniques give.

python -m pytest tests/primitives/test_plain_recipes.py
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.core.measure import measure_memory
from curry_train.primitives import (
    GradFlow,
    GradientAccumulation,
    apply_sac,
    checkpoint_timesteps,
    chunked_cross_entropy,
    recompute_blocks,
    train_window,
)

from ..peers.peer_state import Dropping
from ..skills.pages import fenced_blocks
from ..toy_steps import all_equal, drawn, gradients_of, seeded_stack, square_sum
from ..tree import ROOT


def recipe(page):
    """Run the block of a page, which has an example at its end, and return its names."""
    (block,) = fenced_blocks((ROOT / "skills" / page).read_text(), language="python")
    assert "curry_train" not in block.text
    assert 10 <= len([line for line in block.text.splitlines() if line.strip()]) <= 50
    names = {"__name__": "recipe"}
    exec(compile(block.text, page, "exec"), names)  # noqa: S102
    return names


X = drawn(32, 8)


def chain(change=lambda model: None, norm=nn.BatchNorm1d):
    model = seeded_stack(Dropping)
    for block in model:
        block.norm = norm(8)
    change(model)
    return model


def step(model):
    torch.manual_seed(2)
    loss = square_sum(model, X)
    loss.backward()
    return [loss.detach(), torch.get_rng_state(), *gradients_of(model), *model.buffers()]


def to_each_block(change):
    def apply(model):
        for block in model:
            change(block)

    return apply


@pytest.mark.parametrize(
    ("page", "name", "technique", "norm"),
    [
        (
            "recompute/references/plain.md",
            "recompute_in_backward",
            recompute_blocks,
            nn.BatchNorm1d,
        ),
        # Torch's policies update statistics twice.
        ("sac/references/plain.md", "save_products", apply_sac, nn.LayerNorm),
    ],
)
def test_blocks_train_as_under_the_technique_and_hold_as_much(page, name, technique, norm):
    by_hand = to_each_block(recipe(page)[name])
    models = [chain(change, norm) for change in (lambda model: None, by_hand, technique)]
    plain, ours, theirs = map(step, models)
    assert all_equal(ours, plain)
    assert all_equal(theirs, plain)
    held = [measure_memory(model, X, square_sum).held_bytes for model in models]
    assert held[1] < 0.8 * held[0]
    assert abs(held[1] - held[2]) < 0.1 * held[0]


def test_a_window_gives_the_weights_of_train_window():
    names = recipe("grad-accum/references/plain.md")
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))]
    models.append(copy.deepcopy(models[0]))
    window = [(torch.randint(50, (2, n)), torch.randint(50, (2, n))) for n in (3, 9, 5)]
    window[0][1][:, 1:] = -100
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    found = names["train_window"](models[0], window, optimizers[0], max_norm=0.5)
    (whole,) = GradientAccumulation(3).windows(window, count=names["num_terms"])
    result = train_window(models[1], whole, names["summed_loss"], optimizers[1], clip_norm=0.5)
    assert found.item() == pytest.approx(result.loss, rel=1e-6)
    assert all_equal(models[0].parameters(), models[1].parameters())


def test_chunks_of_timesteps_are_those_of_the_technique():
    loop = recipe("snn-timesteps/references/plain.md")["loop_in_chunks"]
    torch.manual_seed(0)
    cell = nn.LSTMCell(4, 4)

    def step(x, state):
        state = cell(F.dropout(x, 0.2), state)
        return state[0], state

    found = []
    for run in (loop, checkpoint_timesteps):
        cell.zero_grad()
        inputs = drawn(23, 3, 4).requires_grad_()
        zero = torch.zeros(3, 4)
        torch.manual_seed(3)
        outputs, state = run(step, inputs, (zero, zero), chunk_size=5)
        (outputs.square().sum() + state[1].sum()).backward()
        found.append([outputs, *state, inputs.grad, *gradients_of(cell)])
    assert all_equal(*found)


def test_norms_of_layers_are_those_of_the_probe_under_recompute():
    watch = recipe("grad-flow/references/plain.md")["LayerNorms"]
    model = chain(recompute_blocks)
    norms = watch(model)
    with GradFlow(model, every=1) as flow:
        step(model)
        flow.step()
    layers = flow.records[0].layers
    gradients = norms.gradients()
    assert len(gradients) == 6
    for name, norm in norms.activations().items():
        assert norm == pytest.approx(layers[name].activation.norm, rel=1e-12)
        assert gradients[name].item() == pytest.approx(layers[name].gradient.norm, rel=1e-12)


def test_the_loss_in_chunks_is_that_of_the_function():
    by_hand = recipe("memory-plan/references/plain-chunked-loss.md")["loss_in_chunks"]
    hidden = drawn(2, 50, 8).requires_grad_()
    weight = drawn(97, 8, seed=2).requires_grad_()
    targets = torch.arange(100).view(2, 50) % 97
    targets[0, :30] = -100
    found = []
    for loss in (by_hand, chunked_cross_entropy):
        value = loss(hidden, weight, targets, chunk_tokens=16)
        found.append([value, *torch.autograd.grad(value, (hidden, weight))])
    # Sums of some hundred float32 terms in another order.
    torch.testing.assert_close(*found, rtol=2e-5, atol=1e-7)
