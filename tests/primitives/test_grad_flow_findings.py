"""Findings of grad-flow on planted figures.

python -m pytest tests/primitives/test_grad_flow_findings.py
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from curry_train.primitives import GradFlow, flow_findings, flow_json, flow_table
from curry_train.primitives.grad_flow import LayerFlow, StepFlow, Update, ValueSpread

from ..plan_models import Runs

GOOD = LayerFlow(
    ValueSpread(100, 10, 0, 100.0), 1, ValueSpread(50, 0, 0, 1e-2), Update(1.0, 1e-3), is_block=True
)
NAMES = tuple(f"layers.{index}" for index in range(4))


def record(
    step=0, *, stepped=True, scaled=1.0, read="after backward", gradient=GOOD.gradient, **layers
):
    """Return a step of four good blocks, with figures replaced by the number of the layer."""
    flows = {name: layers.get(f"at_{name[-1]}", GOOD) for name in NAMES}
    return StepFlow(step, stepped, flows, NAMES, 1, gradient, read, scaled)


def spread(part, **changes):
    return replace(GOOD, **{part: replace(getattr(GOOD, part), **changes)})


@pytest.mark.parametrize(
    "planted",
    [
        {"at_0": spread("gradient", squares=1e-7)},
        {"at_1": spread("activation", zeros=90)},
        {"at_2": spread("update", distance=0.009)},
        {"at_2": replace(GOOD, update=Update(0.0, 0.1))},
        {"at_2": replace(GOOD, update=None, gradient=None, frozen=("layers.2.weight",))},
        {"scaled": 0.3},
        {"scaled": 0.01, "read": "at the optimizer's step"},
    ],
)
def test_figures_within_bounds_are_not_reported(planted):
    assert flow_findings([record(**planted)]) == []


def test_a_single_unusual_step_is_not_a_finding():
    steps = [record(step) for step in range(4)]
    assert flow_findings([*steps, record(4, at_1=spread("activation", zeros=99))]) == []


def test_steps_that_were_skipped_do_not_hide_those_before():
    steps = [record(step, at_1=spread("activation", zeros=99)) for step in range(5)]
    skipped = [record(step, stepped=False) for step in range(5, 10)]
    assert "dead" in {found.kind for found in flow_findings([*steps, *skipped])}


def test_similar_layers_share_a_line():
    dead = spread("activation", zeros=95)
    steps = [record(at_1=dead, at_2=dead, at_3=dead)]
    (found,) = flow_findings(steps)
    assert found.layers == ("layers.1", "layers.2", "layers.3")
    (line,) = (line for line in flow_table(steps).splitlines() if line.startswith("dead"))
    assert line.startswith("dead        layers.1 and 2 more: 95.0% of its activations")


def rows_of(**layers):
    """Return the table of layers below the findings."""
    return flow_table([record(**layers)]).partition("\n\n")[2]


def test_the_table_has_each_figure_of_a_layer_or_why_it_has_none():
    mixed = replace(
        GOOD,
        activation=ValueSpread(10_000, 9996, 1, 4e4),
        gradient=ValueSpread(1000, 125, 600, 9.0),
        update=Update(1.0, 3e-4),
    )
    assert (
        rows_of(at_1=mixed)
        == """\
layer                                   activation           gradient   update
                                     rms zero  bad     norm zero  bad    ratio
layers.0                         1.0e+00  10%   0%  1.0e-01   0%   0%  1.0e-03
layers.1                         2.0e+00 100%   1%  3.0e+00  13%  60%  3.0e-04
layers.2                         1.0e+00  10%   0%  1.0e-01   0%   0%  1.0e-03
layers.3                         1.0e+00  10%   0%  1.0e-01   0%   0%  1.0e-03"""
    )
    assert (
        rows_of(
            at_0=replace(GOOD, activation=None, gradient=None, update=None, frozen=("w",)),
            at_1=replace(GOOD, gradient=None, tied=("w",)),
            at_2=replace(GOOD, gradient=None, without_gradient=("w",), update=Update(0.0, 1.0)),
            at_3=replace(GOOD, gradient=None, update=None),
        )
        == """\
layer                                   activation           gradient   update
                                     rms zero  bad     norm zero  bad    ratio
layers.0                                not called             frozen        -
layers.1                         1.0e+00  10%   0%               tied  1.0e-03
layers.2                         1.0e+00  10%   0%               none      new
layers.3                         1.0e+00  10%   0%                  -        -"""
    )


def test_the_head_of_a_report_has_the_steps_and_every_finding():
    dead = spread("activation", zeros=95)
    bad = spread("activation", nonfinite=1, elements=10_000, squares=float("nan"))
    flow = replace(record(10, at_1=dead, at_2=dead, at_3=bad, scaled=0.05), notes=("a note",))
    assert (
        flow_table([record(), flow]).partition("\n\n")[0]
        == """\
2 steps probed, the last is 10: 1 forwards, gradient norm 0.1 after backward,
then multiplied by 0.05
a note
nonfinite   layers.3: 1 of its 10,000 activations are inf or nan, the first
            layer in forward order (step 10)"""
    )


def test_a_report_without_records_has_a_message():
    assert "no step was probed" in flow_table([])


def scaled(factor):
    return Runs(lambda _, x: x * factor)


def chain(*, factors=None, gradient=1.0, detached=None, broken=None):
    """Return layers that add to their input, with factors on outputs and on the gradient."""

    def run(layers, x):
        for number, layer in enumerate(layers):
            out = layer(x)
            x = x + (out.detach() if number == detached else out)
            x = x.detach() * (1 - gradient) + x * gradient
            if number == broken:
                x.register_hook(lambda gradient: gradient * math.inf)
        return x

    factors = factors or {}
    products = (nn.Linear(16, 16, bias=False) for _ in range(4))
    return Runs(
        run,
        *(nn.Sequential(one, scaled(factors.get(n, 1.0))) for n, one in enumerate(products)),
    )


def probe(*, rate=1e-3, clip=None, loss=lambda x: x.square().mean(), **options):
    torch.manual_seed(0)
    model = chain(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with GradFlow(model, optimizer, every=1) as flow:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.randn(8, 16))).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return flow


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"factors": {2: math.inf}}, [("nonfinite", "inner.2", 1.0)]),
        # The derivative of this loss is infinite.
        ({"loss": lambda x: (x * 0).abs().sqrt().sum()}, [("nonfinite", "inner.3.0", 1.0)]),
        ({"broken": 2}, [("nonfinite", "inner.2.0", 1.0)]),
        # The optimizer alone makes them so.
        ({"rate": math.inf}, [("nonfinite", "inner.0.0", None)]),
        ({"gradient": 0.05}, [("vanishing", "inner.0", 0.05**3)]),
        ({"gradient": 20.0}, [("exploding", "inner.0", 20.0**3)]),
        (
            {"factors": {1: 0.0}},
            [
                ("dead", "inner.1", 1.0),
                ("no-gradient", "inner.1.0", 0.0),
                ("update", "inner.1.0", 0.0),
            ],
        ),
        ({"detached": 2}, [("no-gradient", "inner.2.0", 0.0), ("update", "inner.2.0", 0.0)]),
        ({"rate": 1.0}, [("update", "inner.0.0", None)]),
        ({"rate": 1e-7}, [("update", "inner.0.0", None)]),
        ({"clip": 1e-3}, [("scaled", "", None)]),
    ],
)
def test_each_planted_fault_is_found_and_no_other(options, expected):
    flow = probe(**options)
    found = sorted(flow_findings(flow.records), key=lambda one: one.kind)
    assert [(one.kind, min(one.layers, default="")) for one in found] == [
        one[:2] for one in expected
    ]
    for one, (_, _, value) in zip(found, expected, strict=True):
        assert value is None or value / 2 <= one.value <= value * 2
    assert sorted(one["kind"] for one in flow_json(flow)["findings"]) == [one.kind for one in found]
    text = " ".join(flow_table(flow.records, most=3).split())
    assert all(f"{one.message} (step {one.step})" in text for one in found)
    assert ("nothing is wrong" in text) == (not found)
    # The layers that are named stay in a short table.
    rows = text.partition(" ratio ")[2]
    assert all(f"{one.layers[0]} " in rows for one in found if one.layers)
