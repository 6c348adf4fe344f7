"""The chain of measured options predicts whole steps, and equal blocks are measured together.

python -m pytest tests/plan/test_menu.py
"""

import functools
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.plan import Sketch, find_profile, record
from curry_train.plan.card import Card
from curry_train.plan.costs import candidates, find_kinds
from curry_train.plan.saved import Candidate, Option
from curry_train.plan.whole_step import WholeSteps
from curry_train.workloads.models import Bottleneck, transformer

from ..plan_models import Block, Runs, estimated, squares

LLAMA = transformer(depth=2)
OTHERS = ("sac", "regions")  # than full recompute


def stack(build, number, *shape):
    def loss(module, x):
        return module(x).square().flatten(1).mean(1).sum()

    # The first layer makes the input of every block require grad.
    return squares(
        lambda: nn.Sequential(nn.PReLU(), nn.Sequential(*map(build, range(number)))),
        *shape,
        loss=loss,
    )


def measured(made, *, offload=False, without=()):
    """Return whole steps with measured menus, and the options that could not run."""
    with Sketch(made) as sketch:
        steps = WholeSteps(sketch, card=Card(find_profile("cpu")))
        steps.measure(chunked=False, offload=offload, without=without)
        return steps, steps.left_out


def kinds_of(made):
    """List the names of equal blocks."""
    with Sketch(made) as sketch:
        kinds = find_kinds(sketch.blocks(sketch.build()), [sketch.step(2), sketch.step(4)])
    return [tuple(names) for names in kinds]


# The chain against whole steps.


class Gated(Block):
    def __init__(self):
        super().__init__(64, width=16)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        value, gate = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(value * F.silu(gate))


BLOCKS = {
    "gated": (Gated, (8, 16)),
    "relu": (functools.partial(Bottleneck, 16), (16, 6, 6)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_chain_predicts_the_peaks_of_whole_steps(name):
    build, shape = BLOCKS[name]
    with Sketch(stack(lambda _: build(), 3, *shape)) as sketch:
        steps = WholeSteps(sketch, card=Card(find_profile("cpu")))
        steps.measure(chunked=False, offload=False)
        assert not steps.left_out
        draw = random.Random(0)
        num_exact = 0
        for size, num_steps in ((4, 1), (4, 2), (16, 1)):
            chain = steps.priced(Candidate(size, num_steps, False))
            kinds = {option.kind for option in chain.blocks[0].options}
            assert {"none", "regions", "full"} <= kinds
            assert "offload" not in kinds
            for _ in range(2):
                options = {block.name: draw.choice(block.options) for block in chain.blocks}
                real = steps.step(Candidate(size, num_steps, False, options=options)).peak_bytes
                predicted = chain.peak(options)
                assert real <= predicted <= 1.05 * real, (size, num_steps, options)
                num_exact += predicted == real
    assert num_exact >= 4


def test_offload_moves_activations_only():
    steps, _ = measured(LLAMA, offload=True, without=("sac",))
    (plain,) = {block.held for block in steps.plain_steps(chunked=False)[-1].blocks.values()}
    assert -plain <= steps.menus["layers.0"][Option("offload")].large[0] < -0.99 * plain


def test_the_time_of_a_selective_policy_has_its_own_work_on_each_operation():
    steps, _ = measured(LLAMA)
    menu = steps.menus["layers.0"]
    full = menu[Option("full")].slowdown
    assert {option.kind for option in menu if menu[option].slowdown > full} == {"sac"}
    assert 1 < menu[Option("regions")].slowdown < full


class Listing(Gated):
    """Returns all outputs of the blocks before too."""

    def forward(self, seen):
        return [*seen, super().forward(seen[-1])]


class Carrying(Gated):
    """Hands on what the first block has made, and the input of all blocks."""

    def forward(self, seen):
        y = super().forward(seen[-1])
        return [seen[0], seen[1] if len(seen) > 1 else y, y + seen[0]]


class Again(Gated):
    """Is called again with its own output."""

    def forward(self, seen):
        return [super().forward(seen[-1])]


@pytest.mark.parametrize(("build", "times"), [(Listing, 1), (Carrying, 1), (Again, 2)])
def test_blocks_that_hand_on_tensors_of_others_have_a_backward_of_their_own(build, times):
    def run(inner, x):
        first, blocks = inner
        seen = [first(x)]
        for block in blocks:
            for _ in range(times):
                seen = block(seen)
        return torch.stack(seen).sum(0)

    made = squares(lambda: Runs(run, nn.PReLU(), nn.ModuleList(build() for _ in range(3))), 8, 16)
    steps, _ = measured(made, without=OTHERS)
    found = steps.plain_steps(chunked=False)[-1].blocks.values()
    assert all(block.peak > block.held > 0 for block in found)
    numbers = {len(block.operations) for block in found}
    assert max(numbers) < 1.3 * min(numbers)
    for menu in steps.menus.values():
        assert 1.1 < menu[Option("full")].slowdown < 1.5


def test_full_recompute_costs_its_flops_where_no_backward_can_be_told_apart(monkeypatch):
    monkeypatch.setattr(record.StepLayers, "in_backward", record.REST_LAYER)
    # No hook of a module follows the recompute of such a block.
    steps, _ = measured(stack(lambda _: nn.GRUCell(64, 64), 3, 64), without=OTHERS)
    assert all(menu[Option("full")].slowdown > 1.0 for menu in steps.menus.values())


# Which blocks are equal.


def test_blocks_of_one_kind_are_measured_together(monkeypatch):
    counts = {}
    recorded = mock.create_autospec(WholeSteps.recorded, side_effect=WholeSteps.recorded)
    monkeypatch.setattr(WholeSteps, "recorded", recorded)
    for depth in (2, 6):
        recorded.reset_mock()
        steps, _ = measured(stack(lambda _: Gated(), depth, 8, 16))
        assert len(steps.menus) == depth
        num_options = len(steps.menus["1.0"]) - 1
        # Two plain steps, and full recompute at the smaller size.
        assert recorded.call_count == 3 + -(-num_options // depth)
        counts[depth] = num_options
    assert counts[2] == counts[6] > 2


def windowed(again):
    """A block like others in class, parameters and held bytes, but with another window."""

    def run(inner, x):
        y = inner[0](x)
        with torch.no_grad():
            scale = torch.stack([y * y for _ in range(again)]).mean() + 1
        return x + y * scale

    return Runs(run, nn.Linear(16, 16))


def test_two_kinds_of_one_class_are_not_confused():
    made = stack(lambda index: windowed(1 + 7 * (index % 2)), 4, 16)
    assert kinds_of(made) == [("1.0", "1.2"), ("1.1", "1.3")]


def test_a_frozen_block_is_a_kind_of_its_own():
    def build():
        model = transformer(depth=3, dim=32).build()
        return model.layers[1].requires_grad_(False) and model

    assert kinds_of(replace(LLAMA, build=build)) == [("layers.0", "layers.2"), ("layers.1",)]


def test_a_reason_for_which_many_options_can_not_run_is_there_once():
    def recurrent(_):
        return nn.Sequential(nn.GRUCell(16, 16), nn.Linear(16, 16), nn.Tanh())

    _, left_out = measured(stack(recurrent, 2, 16))
    assert [reason.partition(" runs")[2][:18] for reason in left_out] == [" aten.unsafe_split"]


class Neuron(nn.Module):
    """Keeps its potential from one call to the next, with the graph of that call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.kept = {"potential": 0.0}

    def forward(self, x):
        self.kept["potential"] = 0.5 * self.kept["potential"] + self.linear(x)
        self.sum = getattr(self, "sum", 0.0) + self.kept["potential"]
        return torch.sigmoid(self.sum)


def over_time(neurons, x):
    for neuron in neurons:
        neuron.kept["potential"] = 0.0
        vars(neuron).pop("sum", None)
    for _ in range(3):
        for neuron in neurons:
            x = neuron(x)
    return x


def given(error):
    """Return a block that a model must prepare before each call, which no attribute shows."""
    prepared = []

    def run(inner, x):
        if not prepared:
            raise error("call prepare() first")
        prepared.pop()
        return torch.tanh(inner[0](x))

    block = Runs(run, nn.Linear(16, 16))
    block.prepare = lambda: prepared.append(True)
    return block


def prepares_each(layers, x):
    for layer in layers:
        layer.prepare()
        x = layer(x)
    return x


@pytest.mark.parametrize("error", [None, AssertionError, RuntimeError])
def test_blocks_are_offered_what_they_can_do_in_their_model(error):
    def build():
        if error:
            return Runs(prepares_each, given(error), given(error))
        return Runs(over_time, Neuron(), Neuron())

    steps, left_out = measured(squares(build, 16), offload=True)
    assert [*steps.menus] == ["inner.0", "inner.1"]
    for menu in steps.menus.values():
        kinds = {option.kind for option in menu}
        assert {"none", "offload" if error else "full"} <= kinds
        assert ("full" in kinds) == (error is None)
    assert ("inner.0 can't run as full: call prepare() first" in left_out) == bool(error)


def test_calls_that_draw_are_never_offered(monkeypatch):
    def offered():
        expensive = estimated(LLAMA, 4).blocks["layers.0"].expensive
        return {call for option in candidates(expensive, offload=False) for call in option.keep}

    assert ("attention", 0) in offered()
    monkeypatch.setattr(
        record.sac, "draws", lambda operation, args, kwargs: "attention" in str(operation)
    )
    assert ("attention", 0) not in offered()
