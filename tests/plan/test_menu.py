"""A block's estimated cost under each option is the real one's, and equal blocks are equal.

python -m pytest tests/plan/test_menu.py
"""

import contextlib
import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.core.generators import seeded
from curry_train.core.measure import LiveStorages
from curry_train.plan import costs
from curry_train.plan.costs import BlockKind, candidates, find_kinds, measure_menus
from curry_train.plan.device import SAC_SECONDS, find_profile
from curry_train.plan.estimate import Sketch
from curry_train.plan.saved import (
    FULL_KIND,
    NONE_KIND,
    OFFLOAD_KIND,
    REGIONS_KIND,
    SAC_KIND,
    Option,
    apply_options,
)
from curry_train.workloads.models import Bottleneck, transformer
from curry_train.workloads.workload import Case, Workload

CASE = Case(transformer(depth=2), batch_size=4)
LOSS = CASE.workload.mean_loss


def workload(build, shape, name="own"):
    return Workload(
        name,
        build,
        lambda size: torch.randn(size, *shape),
        lambda module, x: module(x).square().flatten(1).mean(1).sum(),
    )


class Scale(nn.Module):
    """First layer of a stack, which makes the input of every block require grad."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


def stack(build, number, shape):
    return workload(
        lambda: nn.Sequential(Scale(), nn.Sequential(*[build(index) for index in range(number)])),
        shape,
    )


@contextlib.contextmanager
def kinds_of(made):
    """List the kinds of blocks, on tensors without values."""
    with Sketch(made) as sketch:
        yield find_kinds(sketch, sketch.step(4), 4)


# The figures of a block alone.


def real_figures(build, x, option):
    """Return the bytes held after forward, and the peak on top, of a block on real tensors."""
    holder = nn.ModuleList([build()]).train()
    apply_options(holder, {"0": option})
    leaf = x.clone().requires_grad_()
    with seeded(0), LiveStorages() as lives:
        given = leaf.clone()
        output = holder[0](given)
        del given
        kept = output.clone()
        own = set(lives.lives_of(output))
        del output
        passed_on = sum(life.nbytes for life in own if life.died is None)
        held, lives.bytes_peak = lives.bytes_alive - kept.nbytes - passed_on, lives.bytes_alive
        torch.autograd.backward([kept], [torch.ones_like(kept)])
    return held, lives.bytes_peak - kept.nbytes - held


class Gated(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 64)
        self.down = nn.Linear(32, width)

    def forward(self, x):
        value, gate = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(value * F.silu(gate))


BLOCKS = {
    "gated": (Gated, (8, 16)),
    "relu": (functools.partial(Bottleneck, 16), (16, 6, 6)),
    "gelu": (lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU()), (16,)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_of_each_option_are_those_of_the_real_block(name):
    build, shape = BLOCKS[name]
    with kinds_of(stack(lambda _: build(), 3, shape)) as (kind,):
        found = {option: kind.run(option)[0] for option in candidates(kind, offload=False)}
    assert {NONE_KIND, REGIONS_KIND, FULL_KIND} <= {option.kind for option in found}
    x = torch.randn(4, *shape)
    for option, measured in found.items():
        assert (measured.held, measured.transient) == real_figures(build, x, option), option


def test_offload_moves_activations_only():
    with kinds_of(CASE.workload) as (kind,):
        plain, away = (kind.run(Option(which))[0] for which in (NONE_KIND, OFFLOAD_KIND))
        assert away.held < 0.01 * plain.held
        assert (
            plain.held - away.held <= away.moved_away
        )  # a tensor that two blocks share moves once per block
        assert kind.run(Option(NONE_KIND))[0].held == plain.held  # the block is unchanged


def test_a_failing_option_leaves_the_block_unchanged(monkeypatch):
    with kinds_of(CASE.workload) as (kind,):
        before = type(kind.block)
        monkeypatch.setattr(before, "forward", lambda self, *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kind.run(Option(FULL_KIND))
        assert type(kind.block) is before
        assert all(parameter.grad is None for parameter in kind.block.parameters())


def test_the_time_of_a_selective_policy_has_its_own_work_on_each_operation():
    with kinds_of(CASE.workload) as (kind,):
        profile = find_profile("cpu")
        kept = Option(SAC_KIND, frozenset({("matmul", 0)}))
        measured, _ = kind.run(kept)
        slower = measured.seconds(kept, profile, "float32") - measured.seconds(
            Option(FULL_KIND), profile, "float32"
        )
        assert 0 < slower <= SAC_SECONDS * measured.again.sum() * (1 + 1e-9)


# Which blocks are equal.


def measured_kinds(made, monkeypatch):
    calls = []
    run = BlockKind.run
    monkeypatch.setattr(
        BlockKind, "run", lambda self, option: calls.append(self.names) or run(self, option)
    )
    with Sketch(made) as sketch:
        menus, _ = measure_menus(
            sketch,
            [sketch.step(2), sketch.step(4)],
            offload=False,
            without=(SAC_KIND, REGIONS_KIND),
        )
    return menus, calls


def test_blocks_of_one_kind_are_measured_once(monkeypatch):
    counts = {}
    for depth in (2, 6):
        menus, calls = measured_kinds(stack(lambda _: Gated(), depth, (8, 16)), monkeypatch)
        assert len(menus) == depth
        counts[depth] = len(calls)
        monkeypatch.undo()
    assert counts[2] == counts[6] <= 6


class Windowed(nn.Module):
    """A block like others in class, parameters and held bytes, but with another window."""

    def __init__(self, again):
        super().__init__()
        self.again, self.linear = again, nn.Linear(16, 16)

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            scale = torch.stack([y * y for _ in range(self.again)]).mean() + 1
        return x + y * scale


class Dropping(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(rate)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))


@pytest.mark.parametrize(
    "build",
    [
        lambda index: Windowed(1 + 7 * (index % 2)),
        lambda index: Dropping(0.5 * (index % 2)),
        lambda index: nn.Sequential(
            nn.Linear(16, 16 + 16 * (index % 2)), nn.GELU(), nn.Linear(16 + 16 * (index % 2), 16)
        ),
    ],
    ids=["another attribute", "dropout", "another width"],
)
def test_two_kinds_of_one_class_are_not_confused(build):
    with kinds_of(stack(build, 4, (16,))) as kinds:
        assert [kind.names for kind in kinds] == [("1.0", "1.2"), ("1.1", "1.3")]
        first, second = (
            [kind.run(Option(which))[0] for which in (NONE_KIND, FULL_KIND)] for kind in kinds
        )
    assert [(cost.held, cost.transient) for cost in first] != [
        (cost.held, cost.transient) for cost in second
    ]


def test_a_frozen_block_is_a_kind_of_its_own():
    def build():
        model = transformer(depth=3, dim=32).build()
        return model.layers[1].requires_grad_(False) and model

    made = Workload("frozen", build, CASE.workload.batch, CASE.workload.loss)
    with kinds_of(made) as kinds:
        assert [kind.names for kind in kinds] == [("layers.0", "layers.2"), ("layers.1",)]


def test_an_option_that_a_block_can_not_run_is_left_out_with_the_reason():
    runs = Counter()

    class Writes(nn.Module):
        """A block that computes something else every second time, by a count outside of it."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            runs[self] += 1
            x = self.linear(x)
            return torch.tanh(x) if runs[self] % 2 else torch.tanh(x) * torch.sigmoid(x)

    made = stack(lambda _: Writes(), 2, (16,))
    with Sketch(made) as sketch:
        menus, left_out = measure_menus(
            sketch, [sketch.step(2), sketch.step(4)], offload=False, without=(SAC_KIND,)
        )
    assert any(f"can't run as {FULL_KIND}" in reason for reason in left_out)
    assert all(option.kind != FULL_KIND for menu in menus.values() for option, _ in menu)


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


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Neuron() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            layer.kept["potential"] = 0.0
            vars(layer).pop("sum", None)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return x


def test_a_block_that_keeps_state_runs_from_that_of_its_first_call():
    spiking = workload(Spiking, (16,))
    with Sketch(spiking) as sketch:
        first, *_ = find_kinds(sketch, sketch.step(4), 4)
        anyhow = replace(first, attributes=None)
        anyhow.run(Option(NONE_KIND))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            anyhow.run(Option(NONE_KIND))
        menus, left_out = measure_menus(sketch, [sketch.step(2), sketch.step(4)], offload=False)
    assert [*menus] == ["layers.0", "layers.1"]
    assert not left_out
    for menu in menus.values():
        assert {option.kind for option, _ in menu} >= {NONE_KIND, FULL_KIND}


class Prepared:
    """An object that is no plain attribute, which a model sets before each call of its block."""

    def __init__(self):
        self.calls = 0

    def use(self):
        assert self.calls, "call prepare() first"
        self.calls -= 1


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.prepared = Prepared()

    def forward(self, x):
        self.prepared.use()
        return torch.tanh(self.linear(x))


class Giving(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Given() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            layer.prepared.calls = 1
            x = layer(x)
        return x


def test_a_block_that_does_not_run_by_itself_is_planned_as_it_is():
    with Sketch(workload(Giving, (16,))) as sketch:
        menus, left_out = measure_menus(sketch, [sketch.step(2), sketch.step(4)], offload=False)
    assert menus == {}
    assert left_out == tuple(
        f"layers.{index} does not run by itself (call prepare() first): it is planned as it is"
        for index in range(2)
    )


def test_calls_that_draw_are_never_offered(monkeypatch):
    with kinds_of(CASE.workload) as (kind,):
        assert any(("attention", 0) in option.keep for option in candidates(kind, offload=False))
        monkeypatch.setattr(
            costs.sac,
            "draws",
            lambda operation, args, kwargs: "attention" in str(operation),
        )
        anew = replace(kind)  # which has not run yet
        assert not any(
            ("attention", 0) in option.keep for option in candidates(anew, offload=False)
        )


# Policies that keep calls by their position.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Option("half"),
            "a block is run as one of none, full, offload, sac, regions, got 'half'",
        ),
        (lambda: Option(SAC_KIND), "'sac' needs keep"),
        (lambda: Option(FULL_KIND, frozenset({("matmul", 0)})), "other kinds take none"),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_options_have_distinct_texts_and_can_be_read_back_from_json():
    option = Option(SAC_KIND, frozenset({("matmul", 3), ("matmul", 0), ("attention", 0)}))
    assert str(option) == "sac(attention 0; matmul 0,3)"
    assert Option.from_json(option.to_json()) == option
    assert Option.from_json({"kind": FULL_KIND}) == Option(FULL_KIND)
