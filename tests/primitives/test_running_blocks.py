"""Blocks are modules that run, in models whose containers are never called or hold it all.

python -m pytest tests/primitives/test_running_blocks.py
"""

import pytest
import torch
from torch import nn

from curry_train.core.blocks import find_blocks
from curry_train.core.generators import seeded
from curry_train.core.measure import measure_memory
from curry_train.primitives import (
    apply_regions,
    apply_sac,
    memory_budget,
    offload_blocks,
    recompute_blocks,
)
from curry_train.primitives.running_blocks import ForwardRecord, choose_blocks

from ..peers.peer_table import Block as Half
from ..plan_models import Runs, in_turn
from ..toy_steps import feed_forward, require_same_step, square_sum, stacked
from ..unchanged import unchanged

WIDTH = 8


class PairsInLists(nn.Module):
    """A transformer whose layers are lists of two, as in many vision libraries."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Half(), Half()]) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for first, second in self.layers:
            x = second(first(x))
        return self.head(x.mean(1))


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(Half(), Half())


def stages():
    """Two stages in a container, one of which holds most of the bytes, as in Swin."""
    return nn.Sequential(*(Runs(in_turn, *(Block() for _ in range(depth))) for depth in (6, 2)))


class DoubleConv(nn.Sequential):
    def __init__(self, inside, outside):
        layers = []
        for width in (inside, outside):
            layers += [nn.Conv2d(width, outside, 3, padding=1), nn.BatchNorm2d(outside)]
            layers += [nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """No container holds two modules of a kind, and skips go around the middle."""

    def __init__(self):
        super().__init__()
        self.first = DoubleConv(3, 8)
        self.down = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = DoubleConv(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        wide = self.first(x)
        return self.out(self.last(torch.cat([wide, self.up(self.down(wide))], 1)))


class Iterated(nn.Module):
    """One block that refines its own output several times, as in RAFT."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.update = Half()

    def forward(self, x):
        x = self.encode(x)
        for _ in range(6):
            x = self.update(x)
        return x


class WarmedUp(Iterated):
    """Refines without gradients first, as models of recurrent depth do."""

    def forward(self, x):
        with torch.no_grad():
            x = super().forward(x)
        return super().forward(x)


def batch_for(model):
    with seeded(7):
        return torch.randn((4, 3, 32, 32) if isinstance(model, UNet) else (4, 24, WIDTH))


def made(kind):
    with seeded(0):
        return kind().train()


def chosen(model, **given):
    return choose_blocks(model, batch_for(model), square_sum, **given)


PAIRS = tuple(f"layers.{layer}.{place}" for layer in range(4) for place in range(2))
IN_STAGES = (*(f"0.inner.{n}" for n in range(6)), "1.inner.0", "1.inner.1")
EXPECTED = {
    PairsInLists: PAIRS,
    stages: IN_STAGES,
    UNet: ("first", "down", "last"),
    Iterated: ("update",),
    WarmedUp: ("update",),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_blocks_that_run_lower_the_peak_with_equal_bits(kind):
    choice = chosen(made(kind))
    assert choice.blocks == choice.names == EXPECTED[kind]
    assert choice.coverage >= 0.9
    batch = batch_for(made(kind))
    plain = measure_memory(made(kind), batch, square_sum)
    changed = made(kind)
    assert recompute_blocks(changed, blocks=choice.blocks) == list(choice.names)
    assert measure_memory(changed, batch, square_sum).peak_bytes <= 0.7 * plain.peak_bytes
    require_same_step(made(kind), changed, batch)


def test_a_norm_that_saves_hardly_more_than_its_input_is_no_block():
    model = nn.Sequential(Block(), Block(), nn.Dropout(0.1), nn.LayerNorm(WIDTH))
    assert "3" not in chosen(model).names


def test_a_model_of_the_class_of_its_block_is_no_block_itself():
    model = made(Iterated)
    model.update = made(Iterated)
    assert "" not in chosen(model).names


def test_blocks_that_the_containers_give_stay_where_they_serve():
    model = made(lambda: stacked(Block, 3))
    choice = chosen(model)
    assert choice.blocks is None
    assert list(choice.names) == list(find_blocks(model))
    assert not choice.notes


def test_the_notes_give_the_reason_and_the_line_what_the_blocks_hold():
    assert chosen(made(PairsInLists)).notes == (
        "the containers give layers.0 to layers.3, of which none is called",
    )
    choice = chosen(made(stages))
    assert choice.notes == (
        "chosen by bytes: the 2 blocks that the containers give leave 74% of the saved bytes at "
        "the peak, these 19%",
    )
    assert choice.describe() == ("8 blocks, 0.inner.0 to 1.inner.1, hold 99% of what forward saves")
    assert chosen(made(Iterated)).notes == ("update: called several times in a step",)


@pytest.mark.parametrize(
    "technique", [recompute_blocks, apply_sac, apply_regions, offload_blocks, memory_budget]
)
def test_without_a_batch_containers_that_never_run_are_refused(technique):
    options = {"budget": 0.5} if technique is memory_budget else {}
    with pytest.raises(ValueError, match=r"ModuleList never runs: .* blocks="):
        technique(made(PairsInLists), **options)


def test_blocks_that_write_to_their_input_are_left_out():
    def build():
        blocks = (nn.Sequential(nn.ReLU(inplace=True), Half()) for _ in "123")
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)

    model = made(build)
    choice = chosen(model)
    assert list(choice.names) == [f"{n}.1" for n in (1, 2, 3)]
    assert (
        choice.notes[0] == "the containers give 1 to 3, which hold nothing or can't be recomputed"
    )
    named = chosen(model, blocks="[123]")
    assert named.blocks == "[123]"
    assert "1 to 3: the input is overwritten, as by an" in named.notes[0]


class RunsInsideBackward(torch.autograd.Function):
    """Runs the layer again in backward, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.x = x.detach()
        ctx.layer = layer
        return layer(x.detach())

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


def reversible():
    def run(inner, x):
        first, layers = inner
        x = first(x)
        for layer in layers:
            x = RunsInsideBackward.apply(x, layer)
        return x

    return Runs(run, feed_forward(WIDTH, 64), nn.ModuleList(Block() for _ in range(4)))


def test_modules_that_recompute_by_themselves_are_no_blocks():
    choice = chosen(made(reversible))
    assert choice.blocks is None
    assert any("run in eval mode or without gradients" in note for note in choice.notes)


def test_blocks_in_eval_mode_are_left_out():
    model = made(PairsInLists)
    model.layers[0].eval()
    assert chosen(model).names == PAIRS[2:]


def test_a_layer_that_is_dropped_this_time_is_a_block_too():
    def run(layers, x):
        for number, (layer,) in enumerate(layers):
            if number != 2 or not layer.training:
                x = layer(x)
        return x

    model = made(lambda: Runs(run, *(nn.ModuleList([Block()]) for _ in range(5))))
    assert chosen(model).names == tuple(f"inner.{n}.0" for n in range(5))


def test_a_loss_with_derivatives_is_recorded_too():
    model = made(PairsInLists)

    def force(model, batch):
        batch = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return gradient.square().sum()

    assert choose_blocks(model, batch_for(model), force).names == PAIRS


def test_compiled_blocks_are_not_replaced_by_what_is_left():
    model = made(lambda: stacked(Block, 3))
    for block in model:
        block.compile(backend="eager")
    choice = chosen(model)
    assert choice.blocks is None
    assert "compiled, scripted or wrapped" in choice.notes[0]


def test_recording_leaves_the_model_as_it_was_and_keeps_no_activation():
    model = made(UNet)
    with unchanged(model):
        chosen(model)
    record = ForwardRecord(model)
    with record.running():
        output = model(batch_for(model))
    assert record.total_bytes > 20 * output.nbytes
    assert record.bytes_of({*record._known.values()} - {None}) <= 2 * output.nbytes


def test_a_name_that_only_begins_as_that_of_a_compiled_module_is_a_block():
    model = stacked(Half, 11)
    model[1] = torch.compile(model[1], backend="eager")
    names = chosen(model).names
    assert "10" in names
    assert "1" not in names
