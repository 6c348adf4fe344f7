"""Regions: what they free, cost and cannot reach, on our own and Hugging Face's models.

python -m pytest tests/primitives/test_regions.py
"""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from curry_train.core.measure import count_flops, measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.primitives import apply_regions, recompute_blocks
from curry_train.primitives.regions import NODE_RECIPES, RecomputedTensor, Replay
from curry_train.primitives.rerun import FlatCall

from ..language_models import language_model
from ..plan_models import Runs
from ..toy_steps import drawn, in_bfloat16, require_same_step, square_sum, stacked

WIDER = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
TOKENS = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))


def llama():
    return language_model("Llama", num_key_value_heads=2, **WIDER)


def gpt2():
    return language_model("GPT2", **WIDER)


def lm_loss(model, tokens):
    return F.cross_entropy(
        model(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float(), tokens.flatten()
    )


autocast_loss = in_bfloat16(lm_loss)


def figures(build, loss, apply=lambda model: None):
    torch.manual_seed(0)
    model = build().train()
    apply(model)
    torch.manual_seed(0)
    record = record_step(model, TOKENS, loss)
    return record, measure_memory(model, TOKENS, loss), count_flops(model, TOKENS, loss)


# The figures.


@pytest.mark.parametrize(
    ("build", "also", "loss", "at_most"),
    [
        (llama, (), lm_loss, 0.56),
        (llama, (), autocast_loss, 0.43),  # casts of norms' outputs are derived too
        (gpt2, "*.mlp.act", lm_loss, 0.52),
        (gpt2, "*.mlp.act", autocast_loss, 0.61),
    ],
)
def test_hugging_face_blocks_are_reached_without_an_edit(build, also, at_most, loss):
    plain = figures(build, loss)
    changed = figures(build, loss, lambda model: apply_regions(model, also=also))
    assert compare(plain[0], changed[0]).bit_equal
    assert changed[1].held_bytes / plain[1].held_bytes <= at_most
    assert changed[2] == plain[2]


# Tensors without a recipe, and modules that are named to give them one.


# The same training in every respect.


def test_regions_and_recompute_share_a_model():
    # Torch returns the tensors that a recomputed block has saved once, so no region may ask.
    model = stacked(lambda: nn.Sequential(nn.Linear(8, 8), nn.SiLU()), 2)
    x = torch.randn(4, 8)
    plain = record_step(model, x, square_sum)
    recompute_blocks(model, blocks="0")
    assert apply_regions(model, blocks="1") == ["1"]
    assert compare(plain, record_step(model, x, square_sum)).bit_equal


ACTIVATIONS = {
    "MulBackward0": lambda x: x * torch.sin(x),
    "SiluBackward0": F.silu,
    "GeluBackward0": lambda x: F.gelu(x, approximate="tanh"),
    "MishBackward0": F.mish,
    "HardswishBackward0": F.hardswish,
    "LeakyReluBackward0": lambda x: F.leaky_relu(x, 0.2),
    "SoftplusBackward0": lambda x: F.softplus(x, 2.0, 10.0),
    "GluBackward0": lambda x: F.glu(torch.cat([x, x], -1), -1),
    "PowBackward0": lambda x: x.pow(3),
}


def test_every_recipe_has_a_test():
    assert set(ACTIVATIONS) == set(NODE_RECIPES)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recipe_gives_equal_gradients_and_keeps_less(name, dtype):
    layers = nn.Linear(16, 16), nn.Linear(16, 16)
    model = Runs(lambda inner, x: inner[1](ACTIVATIONS[name](inner[0](x))), *layers)
    plain = nn.Sequential(model).to(dtype)
    changed = copy.deepcopy(plain)
    apply_regions(changed, blocks="0")
    x = (8 * drawn(32, 16)).to(dtype)
    require_same_step(plain, changed, x)
    held = [measure_memory(model, x, square_sum).held_bytes for model in (changed, plain)]
    assert held[0] < held[1]


def test_a_conjugate_is_saved_as_it_is():
    linear = nn.Linear(4, 4, dtype=torch.complex64)
    model = Runs(lambda inner, x: inner[0]((y := inner[0](x) * inner[0](x)) * y.conj()), linear)
    x = torch.randn(8, 4, dtype=torch.complex64)

    def loss(model, x):
        return model(x).abs().sum()

    plain = record_step(model, x, loss)
    apply_regions(nn.Sequential(model), blocks="0")
    assert compare(plain, record_step(model, x, loss)).bit_equal


# Replays of modules.


def test_what_computes_something_else_the_second_time_is_noticed():
    calls = []

    def module(x):
        calls.append(None)
        return torch.sin(x) if len(calls) == 1 else torch.sin(torch.sin(x))

    x = drawn(16, 16).requires_grad_()
    with pytest.raises(
        RuntimeError,
        match=r"^a tensor of shape \(16, 16\) and strides \(16, 1\) was recomputed as .*: its "
        "block computes something else the second time; take it out of the regions$",
    ):
        RecomputedTensor(x, x, x.t).value()
    loss = Replay(FlatCall(module, ((x,), {}))).first().sum()
    with pytest.raises(
        RuntimeError,
        match=r"^a module saved 1 tensors the first time and 2 the second: it computes something "
        "else when it is recomputed; take it out of the regions$",
    ):
        loss.backward()


def test_a_replayed_tensor_is_freed_with_the_graph_though_the_loss_is_held():
    """Guard loops that hold their loss in the next forward against holding two steps' inputs."""
    norm, hidden = nn.LayerNorm(16), torch.randn(8, 16, requires_grad=True) * 2
    let_go = weakref.ref(hidden)
    loss = Replay(FlatCall(norm, ((hidden,), {}))).first().square().sum()
    del hidden
    loss.backward(retain_graph=True)
    assert let_go() is not None  # a second backward needs it
    loss.backward()
    assert let_go() is None


def test_an_input_that_changes_after_its_norm_is_refused():
    """As in blocks that add to their residual in place, whose gradients would be wrong."""
    norm, up = nn.LayerNorm(4), nn.Linear(4, 4)

    def block(inner, x):
        hidden = x * 1
        return inner[1](inner[0](hidden)) + hidden.add_(1)

    model = nn.Sequential(Runs(block, norm, up))
    apply_regions(model, blocks="0")
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it is at version 1"):
        model(torch.ones(2, 4)).sum().backward()


def test_no_dispatch_mode_runs_in_forward_or_backward():
    modes = []

    def note(*_):
        modes.append(_get_current_dispatch_mode())

    model = gpt2().train()
    apply_regions(model)
    for block in model.transformer.h:
        block.ln_2.register_forward_hook(note)
        block.ln_2.register_full_backward_hook(note)
    lm_loss(model, TOKENS).backward()
    assert modes == [None] * 6


def test_a_frozen_norm_takes_a_tensor_of_inference_mode():
    block = nn.Sequential(nn.LayerNorm(4).requires_grad_(False), nn.Linear(4, 4))
    apply_regions(nn.Sequential(block), blocks="0")
    with torch.inference_mode():
        features = torch.ones(2, 4)
    block(features).sum().backward()
    assert block[1].weight.grad is not None
    # A norm inside a transform is not repeated, because its input must not escape.
    torch.vmap(block)(features.clone().requires_grad_()).sum().backward()
