"""Faults planted in a chain of layers are found, in the table and in the JSON.

python -m pytest tests/primitives/test_grad_flow_chains.py
"""

import math

import pytest
import torch
from torch import nn

from curry_train.primitives.grad_flow import GradFlow
from curry_train.primitives.grad_flow_report import flow_findings, flow_json, flow_table

NUM_STEPS = 3
SOUND_RATE = 1e-3


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Chain(nn.Module):
    """Layers that add to their input, with factors on outputs and on the gradient in between."""

    def __init__(self, *, factors=None, gradient=1.0, detached=None, broken=None):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), Scaled((factors or {}).get(number, 1.0)))
            for number in range(4)
        )
        self.gradient = gradient
        self.detached = detached
        self.broken = broken

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            out = layer(x)
            x = x + (out.detach() if number == self.detached else out)
            x = x.detach() * (1 - self.gradient) + x * self.gradient
            if number == self.broken:
                x.register_hook(lambda gradient: gradient * math.inf)
        return x


def infinite_derivative(x):
    return (x * 0).abs().sqrt().sum()


def probe(chain, *, rate=SOUND_RATE, clip=None, loss=lambda x: x.square().mean()):
    torch.manual_seed(0)
    model = Chain(**chain)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with GradFlow(model, optimizer, every=1) as flow:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss(model(torch.randn(8, 16))).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return flow


@pytest.mark.parametrize(
    ("chain", "options", "expected"),
    [
        ({}, {}, []),
        ({"factors": {2: math.inf}}, {}, [("nonfinite", "layers.2", 1.0)]),
        ({}, {"loss": infinite_derivative}, [("nonfinite", "layers.3.0", 1.0)]),
        ({"broken": 2}, {}, [("nonfinite", "layers.2.0", 1.0)]),
        ({"gradient": 0.05}, {}, [("vanishing", "layers.0", 0.05**3)]),
        ({"gradient": 20.0}, {}, [("exploding", "layers.0", 20.0**3)]),
        (
            {"factors": {1: 0.0}},
            {},
            [
                ("dead", "layers.1", 1.0),
                ("no-gradient", "layers.1.0", 0.0),
                ("update", "layers.1.0", 0.0),
            ],
        ),
        (
            {"detached": 2},
            {},
            [("no-gradient", "layers.2.0", 0.0), ("update", "layers.2.0", 0.0)],
        ),
        ({}, {"rate": 1.0}, [("update", "layers.0.0", None)]),
        ({}, {"rate": 1e-7}, [("update", "layers.0.0", None)]),
        ({}, {"clip": 1e-3}, [("scaled", "", None)]),
    ],
)
def test_each_planted_fault_is_found_and_no_other(chain, options, expected):
    flow = probe(chain, **options)
    found = sorted(flow_findings(flow.records), key=lambda one: one.kind)
    assert [(one.kind, min(one.layers, default="")) for one in found] == [
        one[:2] for one in expected
    ]
    for one, (_, _, value) in zip(found, expected, strict=True):
        assert value is None or value / 2 <= one.value <= value * 2
    written = flow_json(flow)["findings"]
    assert sorted(one["kind"] for one in written) == [one.kind for one in found]
    text = " ".join(flow_table(flow.records, most=3).split())
    assert all(f"{one.message} (step {one.step})" in text for one in found)
    assert ("nothing is wrong" in text) == (not found)
    # The layers that are named stay in a short table.
    rows = text.partition(" ratio ")[2]
    assert all(f"{one.layers[0]} " in rows for one in found if one.layers)
