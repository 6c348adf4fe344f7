"""Gates on adapters over a frozen base, and the faults that fine-tuning brings along.

python -m pytest tests/gates/test_adapters.py
"""

import pytest
import torch
from faulty_recompute import no_generator_kept, patched, rerun
from torch import nn

from curry_train.gates.verdict import discover
from curry_train.primitives.recompute import recompute_blocks
from curry_train.workloads.workload import Case, default_workload

WIDTH = 16
GATE = {gate.name: gate for gate in discover()}["recompute/parity-full"]


class AdaptedRouter(nn.Module):
    """A frozen layer with an adapter of low rank, and a router that draws noise for its choice."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.score = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.tanh(self.base(x) + self.up(self.down(x)))
        scores = self.score(x).sigmoid()
        noise = torch.rand_like(scores) if self.training else 0.0
        chosen = torch.topk(scores.detach() + noise, 4, dim=-1).indices
        return x + hidden * torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))


def make():
    return nn.Sequential(*(AdaptedRouter() for _ in range(3))), torch.randn(8, WIDTH)


CASE = Case(default_workload("adapters", lambda: make()[0], make()))


def detached_input(run, x):
    """The adapter trains on its input alone, as reentrant recompute of a frozen start does."""
    return rerun(run, x.detach())


def base_trained(module, sample):
    """Give the frozen base gradients too."""
    names = recompute_blocks(module)
    for name in names:
        module.get_submodule(name).base.requires_grad_(True)
    return names


FAULTS = {
    "detached input": patched(detached_input),
    "base saved as gradient": base_trained,
    "router drawn twice": no_generator_kept,
}


def test_recompute_of_adapters_holds():
    assert GATE.check(CASE).passed is True


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_adapters_or_routers_is_caught(name):
    assert GATE.check(CASE, apply=FAULTS[name]).passed is False
