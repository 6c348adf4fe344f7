"""Faults of recompute around a router: choices made anew, and loads that count twice.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import torch
from torch import nn

from curry_train.core.blocks import find_blocks
from curry_train.primitives import keep_routing

from ..plan_models import squares
from ..toy_steps import stacked
from .saboteurs import planted

WIDTH = 16
EXPERTS = 4


class Router(nn.Module):
    """Chooses two experts by score and a bias that balances the load, and counts the load."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x):
        scores = torch.softmax(self.score(x), -1)
        _, chosen = torch.topk(scores.detach() + self.bias, 2, dim=-1)
        self.load += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        return scores.gather(-1, chosen), chosen


class Experts(nn.Module):
    """A block with experts of equal shapes, so that another choice is not noticed."""

    def __init__(self, router=Router):
        super().__init__()
        self.router = router()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        weights, chosen = self.router(x)
        out = torch.einsum("tkwv,tw->tkv", self.experts[chosen], x).tanh()
        return x + (weights[..., None] * out).sum(1)


ROUTED = squares(lambda: stacked(Experts, 3), WIDTH, name="routed")


def choices_not_kept(module):
    return list(find_blocks(module))


def first_block_kept(module):
    return keep_routing(module, blocks="0")


def load_counted_again(module):
    names = keep_routing(module)
    for block in module:
        runs = []

        def count(*_, load=block.router.load, runs=runs):
            runs.append(None)
            if len(runs) == 2:
                load.data.add_(1.0)

        block.router.score.register_forward_hook(count)
    return names


FAULTS = [
    planted("recompute.routing", name, keep=keep, model=ROUTED, hint="chooses others")
    for name, keep in {"no-op": choices_not_kept, "first-block-alone": first_block_kept}.items()
]
FAULTS += [
    planted(
        "recompute.load-once",
        "counted-again",
        keep=load_counted_again,
        model=ROUTED,
        hint="a counter of the load",
    )
]
