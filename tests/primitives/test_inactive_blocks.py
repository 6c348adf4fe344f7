"""Blocks of each technique take keyword arguments, and rest in eval mode and without grad.

python -m pytest tests/primitives/test_inactive_blocks.py
"""

import contextlib

import pytest
import torch
from torch import nn

from curry_train.primitives.offload import offload_blocks
from curry_train.primitives.recompute import Recompute, recompute_blocks
from curry_train.primitives.regions import apply_regions
from curry_train.primitives.sac import apply_sac
from curry_train.primitives.segments import recompute_segments

WIDTH = 16


class ScaledBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0, *, shift=0.0):
        return x + self.second(self.first(self.norm(x)).tanh()) * scale + shift


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(3))

    def forward(self, x, scale, shift):
        for block in self.blocks:
            x = block(x, scale=scale, shift=shift)
        return x


def wrap(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Recompute(block)


TECHNIQUES = {
    "recompute": recompute_blocks,
    "segments": lambda model: recompute_segments(model, 2),
    "wrapped": wrap,
    "sac": apply_sac,
    "regions": apply_regions,
    "offload": lambda model: offload_blocks(model, min_bytes=0),
}


def stack(technique=None):
    torch.manual_seed(0)
    model = Stack()
    if technique is not None:
        TECHNIQUES[technique](model)
    return model


def gradients(model, x):
    scale = torch.tensor(0.7, requires_grad=True)
    shift = torch.tensor(0.2, requires_grad=True)
    output = model(x, scale, shift)
    tensors = [*model.parameters(), scale, shift]
    return [output, *torch.autograd.grad(output.square().sum(), tensors)]


@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_keyword_arguments_reach_the_block_and_get_their_gradients(technique, mode):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = stack()
    changed = stack(technique)
    for model in (plain, changed):
        model.train(mode == "training")
    expected = gradients(plain, x)
    assert all(map(torch.equal, gradients(changed, x), expected))


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_a_block_that_rests_runs_once_as_the_model_wrote_it(technique, context):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    model = stack(technique)
    model.train(context is not contextlib.nullcontext)
    scale = torch.tensor(0.7)
    calls = []
    for module in model.modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(lambda *_: calls.append("forward"))
    with context():
        output = model(x, scale, 0.2)
        assert torch.equal(output, stack()(x, scale, 0.2))
    if output.requires_grad:
        output.sum().backward()
    assert len(calls) == 6
