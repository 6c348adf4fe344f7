"""Steps recorded from some of their equal blocks are those in which all blocks run."""

import functools

import pytest
import torch
from torch import nn

from curry_train.plan.costs import drop_saved
from curry_train.plan.estimate import Sketch
from curry_train.plan.planner import Planner
from curry_train.plan.repeated_blocks import (
    NotRepeated,
    RepeatedLives,
    equal_runs,
    same_record,
)
from curry_train.plan.saved import Option, apply_options
from curry_train.plan.whole_step import WholeSteps
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Workload

DEPTH = 12
NONE = Option("none")
FULL = Option("full")
SAC = Option("sac", frozenset({("matmul", 0)}))
MIXES = {
    "full": [FULL] * DEPTH,
    "sac, then offload": [SAC] * 6 + [Option("offload")] * 6,
    "regions, but the last": [Option("regions")] * (DEPTH - 1) + [NONE],
}


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def sketch(request):
    workload = transformer(depth=DEPTH, dim=16, heads=2, vocabulary=64, length=8)
    with Sketch(workload, kernels=request.param, dtype=torch.bfloat16) as sketch:
        sketch.step(2)  # records the optimizer step
        yield sketch


def step(sketch, options, *, accumulated=False, shortened=True):
    """Estimate a step with these options; return it and the blocks that ran."""
    names = list(sketch.blocks(sketch.build()))
    by_name = dict(zip(names, options, strict=True))
    make = functools.partial(RepeatedLives, runs=equal_runs([names], by_name, names))
    ran = set()
    with drop_saved() as offload:

        def change(module):
            for name in names:
                inside = next(module.get_submodule(name).children())
                inside.register_forward_pre_hook(lambda *_, name=name: ran.add(name))
            apply_options(module, by_name, offload=offload)

        found = sketch.step(
            2, accumulated=accumulated, change=change, make=make if shortened else None
        )
    return found, ran


@pytest.mark.parametrize("mix", MIXES)
def test_a_shortened_step_has_the_record_of_the_whole_one(sketch, mix):
    accumulated = mix.startswith("sac")
    whole, all_ran = step(sketch, MIXES[mix], accumulated=accumulated, shortened=False)
    short, ran = step(sketch, MIXES[mix], accumulated=accumulated)
    assert same_record(short, whole)
    assert short.trace == whole.trace
    assert len(all_ran) == DEPTH
    assert len(ran) == {"full": 4, "sac, then offload": 8, "regions, but the last": 5}[mix]


def test_blocks_that_compute_different_things_are_no_run():
    with Sketch(stack("uneven"), blocks="layers.*") as sketch:
        sketch.step(2)
        with pytest.raises(NotRepeated, match="does not run as"):
            step(sketch, [FULL] * NUM_LAYERS)


def test_runs_are_of_one_kind_and_option_without_a_gap():
    names = [f"layers.{index}" for index in range(20)]
    options = dict.fromkeys(names, FULL) | {"layers.7": NONE}
    assert equal_runs([names], options, names) == [tuple(names[:7]), tuple(names[8:])]
    assert equal_runs([names[:10], names[10:]], options, names) == [
        tuple(names[:7]),
        tuple(names[10:]),
    ]
    assert equal_runs([names[:5]], options, names) == []
    assert equal_runs([], {}, names) == []


NUM_LAYERS = 8


class Wide(nn.Module):
    """Block whose work depends on its place, on what it is called with, or on earlier blocks."""

    def __init__(self, place, *, uneven=False):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.uneven = uneven and place == 2

    def forward(self, x, scale=None):
        y = x + torch.relu(self.inner(x))
        self.latest = 1.0
        if scale is not None:
            y = y * scale
        return torch.tanh(y) if self.uneven else y


class Stack(nn.Module):
    """Blocks whose inputs are made for each, or whose outputs all reach the head."""

    def __init__(self, *, how):
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(Wide(i, uneven=how == "uneven") for i in range(NUM_LAYERS))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            scale = None
            if self.how == "a scale for each":
                scale = self.head.weight.sum(0) * 2
            x = layer(x, scale)
            outputs.append(x)
        if self.how == "read from its blocks":
            x = x * self.layers[4].latest
        return self.head(sum(outputs) if self.how == "all outputs" else x)


def stack(how):
    return Workload(
        how,
        lambda: Stack(how=how),
        lambda size: torch.randn(size, 4, 8),
        lambda module, batch: module(batch).square().sum(),
        count=len,
    )


def planned(how, *, shortened, monkeypatch):
    """Plan a stack; return the plan and whether steps were shortened."""
    if not shortened:
        monkeypatch.setattr(WholeSteps, "_shortened", lambda self, candidate: None)
    with Planner(stack(how), blocks="layers.*", device="cpu") as planner:
        found = planner.plan(15_000, global_batch=4, microbatch=2)
        return found, planner.whole_steps._repeats


@pytest.mark.parametrize(
    ("how", "repeats"),
    [
        ("equal", True),
        ("all outputs", False),
        ("a scale for each", False),
        ("read from its blocks", False),
    ],
)
def test_models_that_do_not_repeat_run_all_their_blocks(how, repeats, monkeypatch):
    found, repeated = planned(how, shortened=True, monkeypatch=monkeypatch)
    assert repeated is repeats
    whole, _ = planned(how, shortened=False, monkeypatch=monkeypatch)
    assert found.to_json() == whole.to_json()
    assert found.candidates == whole.candidates
