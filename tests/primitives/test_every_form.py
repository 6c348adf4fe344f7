"""Blocks that take, draw and keep values in every form train the same under each technique.

python -m pytest tests/primitives/test_every_form.py
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curry_train.gates.same_training import same_training
from curry_train.primitives.strategies import STRATEGIES
from curry_train.workloads.workload import Case, Workload

WIDTH = 64
TOKENS = 16


@dataclass
class Given:
    scale: Tensor


class EveryForm(nn.Module):
    """Takes a list, a tensor by name and a dataclass, draws, writes buffers, counts its calls."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.activation = nn.GELU()
        self.norm = nn.BatchNorm1d(TOKENS)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("largest", torch.zeros(()))
        self.num_calls = 0
        self.seen = []

    def forward(self, x, carried, *, mask, given):
        self.num_calls += 1
        self.seen.append(len(self.seen))
        x = self.norm(x + carried.pop() * given.scale)
        hidden = self.second(self.activation(self.first(x)))
        x = x + F.dropout(hidden, 0.1, self.training) * mask
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)).to(self.mean), 0.1)
            self.largest = torch.maximum(self.largest, x.abs().max().to(self.largest))
        carried.append(torch.tanh(x))
        # A second run that counted or appended again would compute another output.
        counted = 0.01 * (self.num_calls + len(self.seen))
        return x + counted * self.mean.to(x) / (1 + self.largest.to(x)), {"size": x.square().mean()}


class Forms(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(EveryForm() for _ in range(3))

    def forward(self, x):
        carried = [x.square()]
        mask = (x.mean(-1, keepdim=True) > -1).to(x)
        total = 0.0
        for layer in self.layers:
            layer.num_calls = 0
            layer.seen.clear()
            x, sizes = layer(x, carried, mask=mask, given=Given(mask * 0.5))
            total = total + sizes["size"]
        return x.square().sum() + total * len(x)


@pytest.mark.parametrize("strategy", ["full", "sac", "regions", "offload"])
def test_blocks_of_every_form_train_as_without_the_technique(strategy):
    forms = Workload(
        "forms",
        Forms,
        lambda size: torch.randn(size, TOKENS, WIDTH),
        lambda module, batch: module(batch),
    )
    verdict = same_training(
        f"{strategy}/forms",
        Case(forms, batch_size=4),
        STRATEGIES[strategy].apply,
        every_block=strategy == "full",
    )
    assert verdict.passed, verdict
