"""Peaks of models with experts, by how tokens are spread over them.

python -m pytest tests/plan/test_routing_peaks.py
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from curry_train.gates.memory_plan import measured_peak
from curry_train.plan import plan
from curry_train.plan.whole_step import ForcedRouting
from curry_train.workloads.workload import Case, Workload

WIDTH = 16
NUM_EXPERTS = 4
CHOSEN = 2
QUICK = {"device": "cpu", "chunked_loss": False, "without": ["sac", "regions", "offload"]}


class MoeBlock(nn.Module):
    """A block whose tokens go to two of four experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
            for _ in range(NUM_EXPERTS)
        )
        self.counts = []

    def forward(self, x):
        scores, chosen = torch.topk(self.router(x).softmax(-1), CHOSEN, dim=-1)
        out = torch.zeros_like(x)
        self.counts = []
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            self.counts.append(len(rows))
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, places, None])
        return x + out


class MoeNet(nn.Module):
    def __init__(self, *, same=False):
        super().__init__()
        self.blocks = nn.ModuleList(MoeBlock() for _ in range(2))
        if same:
            for block in self.blocks:
                nn.init.zeros_(block.router.weight)
                block.router.bias.data = torch.arange(float(NUM_EXPERTS)).flip(0)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def routed(build=MoeNet):
    return Workload(
        "routed",
        build,
        lambda size: torch.randn(size, WIDTH),
        lambda module, batch: module(batch).square().sum(),
    )


@pytest.mark.parametrize(
    ("even", "counts"), [(True, [16, 16, 16, 16]), (False, [32, 32, 0, 0])], ids=["even", "worst"]
)
def test_tokens_are_spread_evenly_or_all_go_to_the_same_experts(even, counts):
    model = MoeNet()
    with ForcedRouting(even=even):
        model(torch.randn(32, WIDTH)).sum().backward()
    assert [block.counts for block in model.blocks] == 2 * [counts]
    # The scores are the model's own, so the router is trained.
    assert model.blocks[0].router.weight.grad.abs().sum() > 0


def test_a_plan_states_the_peak_of_an_even_and_of_the_worst_routing():
    found = plan(routed(), 2**30, microbatch=512, global_batch=512, **QUICK)
    peaks = found.settings["routing"]
    # The routing of a new model is nearly even.
    assert math.isclose(peaks["even_bytes"], found.peak_bytes, rel_tol=0.01)
    assert peaks["worst_bytes"] > 1.05 * peaks["even_bytes"]
    # A router that gives all tokens the same scores sends them to the first experts.
    same = Case(routed(lambda: MoeNet(same=True)), batch_size=512)
    assert peaks["worst_bytes"] == measured_peak(same, found.apply)
    assert "all tokens choose the same experts." in " ".join(found.explain().split())
    tight = replace(found, budget_bytes=peaks["even_bytes"])
    assert "over the budget" in " ".join(tight.explain().split())


def test_a_model_without_experts_states_no_routing():
    dense = Workload(
        "dense",
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))),
        lambda size: torch.randn(size, WIDTH),
        lambda module, batch: module(batch[batch[:, 0] > -9]).square().sum(),
    )
    found = plan(dense, 2**30, microbatch=4, global_batch=4, **QUICK)
    assert found.settings["why_real"]
    assert found.settings["routing"] is None
