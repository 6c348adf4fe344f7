"""Reproduce the pitfalls of the page `pitfalls`, each with its cure.

python -m pytest tests/skills/test_pitfalls.py
"""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from curry_train.gates.same_training import same_training
from curry_train.primitives import Recompute, recompute_blocks
from curry_train.workloads.workload import Case, Workload


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, mask):
        return self.linear(torch.tanh(x) * (mask[0] if isinstance(mask, tuple) else mask))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


@pytest.fixture
def batch():
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def square(model, batch):
    return model(batch).float().square().mean()


def test_overwriting_the_input_of_a_recomputed_block_is_an_error(
    batch,
):
    class Tanh(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    def written_over(block):
        scale = torch.ones(16, requires_grad=True)
        hidden = batch * scale
        out = block(hidden)
        hidden.zero_()
        out.sum().backward()
        return scale.grad

    assert written_over(Tanh()).abs().sum() > 0  # tanh keeps its output, not its input
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written_over(Recompute(Tanh()))


@pytest.mark.parametrize(
    "give", [lambda mask: mask, lambda mask: (mask,)], ids=["by keyword", "in a container"]
)
def test_an_overwritten_keyword_is_silently_wrong_under_torch_and_refused_by_ours(batch, give):
    def gradient(wrap, *, overwritten):
        torch.manual_seed(0)
        block, mask = Masked(), torch.ones(64, 16)
        out = wrap(block)(batch.clone().requires_grad_(), mask=give(mask))
        if overwritten:
            mask.zero_()
        out.square().sum().backward()
        return block.linear.weight.grad

    def by_torch(block):
        return lambda *args, **kwargs: checkpoint(block, *args, use_reentrant=False, **kwargs)

    right = gradient(Recompute, overwritten=False)
    assert torch.equal(gradient(by_torch, overwritten=False), right)
    assert right.abs().sum() > 0
    assert gradient(by_torch, overwritten=True).abs().sum() == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(Recompute, overwritten=True)


def test_a_step_that_does_not_repeat_bit_for_bit_is_compared_with_a_tolerance():
    steps = itertools.count()

    def loss(model, batch):
        return square(model, batch) * (1 + 1e-6 * next(steps))

    def required(loss):
        workload = Workload(
            "chain",
            lambda: nn.Sequential(Block(), Block()),
            lambda size: torch.randn(size, 16),
            loss,
        )
        verdict = same_training(
            "a/parity", Case(workload), lambda model, sample: recompute_blocks(model)
        )
        assert verdict.passed, verdict
        return verdict.required

    assert "does not repeat bit for bit" in required(loss)
    assert required(square) == "bit-equal"
