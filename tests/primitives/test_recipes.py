"""Recipes rebuild tensors from what autograd keeps, and notice when they cannot.

python -m pytest tests/primitives/test_recipes.py
"""

import contextlib
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from curry_train.primitives.regions import (
    DEEPEST_RECIPE,
    NODE_RECIPES,
    RecomputedTensor,
    Replay,
    pack,
    unpack,
)
from curry_train.primitives.rerun import BlockState

ACTIVATIONS = {
    "MulBackward0": lambda x: x * torch.sin(x),
    "SiluBackward0": F.silu,
    "GeluBackward0": lambda x: F.gelu(x, approximate="tanh"),
    "MishBackward0": F.mish,
    "HardswishBackward0": F.hardswish,
    "LeakyReluBackward0": lambda x: F.leaky_relu(x, 0.2),
    "SoftplusBackward0": lambda x: F.softplus(x, 2.0, 10.0),
    "GluBackward0": lambda x: F.glu(x, -1),
    "PowBackward0": lambda x: x.pow(3),
}


def weights():
    torch.manual_seed(0)
    return torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)


class Packed:
    """Saved-tensor hooks that record what they return to autograd."""

    def __init__(self):
        self.all = []

    def hooks(self):
        return saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor):
        self.all.append(pack(tensor))
        return self.all[-1]


def two_layers(activation, first, second, keeper=None):
    with keeper.hooks() if keeper else contextlib.nullcontext():
        hidden = activation(torch.ones(4, 16, dtype=first.dtype) @ first)
        out = hidden @ second[: hidden.shape[1]]
    return out.square().sum()


def test_every_recipe_has_a_test():
    assert set(ACTIVATIONS) == set(NODE_RECIPES)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recipe_gives_equal_gradients_and_keeps_less(name, dtype):
    first, second = (weight.detach().to(dtype).requires_grad_() for weight in weights())
    two_layers(ACTIVATIONS[name], first, second).backward()
    expected = first.grad, second.grad
    first.grad = second.grad = None
    keeper = Packed()
    loss = two_layers(ACTIVATIONS[name], first, second, keeper)
    assert any(isinstance(saved, RecomputedTensor) for saved in keeper.all)
    loss.backward()
    assert torch.equal(first.grad, expected[0])
    assert torch.equal(second.grad, expected[1])


def test_a_long_chain_of_products_is_not_rebuilt_from_its_start():
    first, _ = weights()
    keeper = Packed()
    with keeper.hooks():
        hidden = torch.ones(4, 16) @ first
        for _ in range(4 * DEEPEST_RECIPE):
            hidden = hidden * torch.sin(hidden)
    kept = [saved for saved in keeper.all if not isinstance(saved, RecomputedTensor)]
    assert len(kept) > 3
    hidden.sum().backward()


# Replays of modules.


def test_a_module_that_takes_another_path_is_noticed():
    calls = []

    def module(x):
        calls.append(None)
        return torch.sin(x) if len(calls) == 1 else torch.sin(torch.sin(x))

    x = weights()[0]
    loss = Replay(BlockState([]), module, (x,), {}).first().sum()
    with pytest.raises(RuntimeError, match="saved 1 tensors the first time and 2 the second"):
        loss.backward()


def test_a_replayed_tensor_is_freed_with_the_graph_though_the_loss_is_held():
    """Guard loops that hold their loss in the next forward against holding two steps' inputs."""
    norm, hidden = nn.LayerNorm(16), torch.randn(8, 16, requires_grad=True) * 2
    let_go = weakref.ref(hidden)
    loss = Replay(BlockState([]), norm, (hidden,), {}).first().square().sum()
    del hidden
    loss.backward(retain_graph=True)
    assert let_go() is not None  # a second backward needs it
    loss.backward()
    assert let_go() is None
