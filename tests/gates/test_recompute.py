"""Gates of recompute name an unfit block, and blocks in which nothing would run again.

python -m pytest tests/gates/test_recompute.py
"""

import itertools
import random

import numpy
import pytest
import torch
from torch import nn

from curry_train.gates import recompute
from curry_train.gates.same_training import same_training
from curry_train.primitives import recompute_blocks
from curry_train.workloads import Case

from ..plan_models import Runs, squares
from ..saboteurs.saboteurs import require, verdict_of
from ..toy_steps import activated, feed_forward, square_sum, stacked
from . import foreign_recompute as foreign


def wide(num_copies):
    """A block whose forward makes copies that it does not save."""

    def run(inner, x):
        copies = torch.sigmoid(inner[0](x)).repeat(1, num_copies)
        return x + inner[1](copies.view(-1, num_copies, 64).mean(1))

    return Runs(run, nn.Linear(16, 64), nn.Linear(64, 16))


def keep_gradients(model, *, blocks):
    """Recompute, and keep copies of the gradient of each block's output."""
    copies = []

    def keep(block, args, output):
        output.register_hook(lambda gradient: copies.append(gradient.repeat(1, 6)))

    for name in recompute_blocks(model, blocks=blocks):
        model.get_submodule(name).register_forward_hook(keep)


def test_a_peak_inside_of_one_block_is_not_held_against_recompute():
    peak_first = squares(lambda: nn.Sequential(wide(5), *(wide(1) for _ in range(3))), 16)
    case = Case(peak_first, batch_size=256)
    verdict = verdict_of(recompute.compare_memory, case)
    require(verdict, None, "what one block needs while it runs owns the peak")
    verdict = verdict_of(recompute.compare_memory, case, recompute_blocks=keep_gradients)
    require(verdict, False, "under torch's own checkpoint")
    require(verdict_of(recompute.compare_memory, case, recompute_blocks=foreign.nothing), False)


# Blocks in which nothing would run again, and blocks that do not run.


def list_of(make, call=lambda layer, x: layer(x)):
    """Build a model that runs a ModuleList of three layers."""

    def run(layers, x):
        for layer in layers:
            x = call(layer, x)
        return x

    return squares(lambda: Runs(run, make(), make(), make()), 8)


@pytest.mark.parametrize("change", [recompute_blocks, foreign.nothing])
def test_gates_do_not_apply_to_blocks_of_a_single_layer(change):
    case = Case(list_of(lambda: nn.Linear(8, 8)), blocks="inner.*")
    assert verdict_of(recompute.compare_selection, case).passed is None
    verdict = verdict_of(recompute.compare_training, case, recompute_blocks=change)
    require(verdict, None, "checkpoint of each block frees nothing")


def past_the_block(layer, x):
    return nn.functional.gelu(nn.functional.linear(x, layer[0].weight, layer[0].bias))


def past_the_first(layer, x):
    return layer(x) if x.requires_grad else x * layer.weight.sum()


@pytest.mark.parametrize(
    ("workload", "change"),
    [
        # Recompute would free memory.
        (list_of(lambda: activated(8)), foreign.nothing),
        # Recompute would free nothing, but run the block again.
        (list_of(lambda: activated(8, nn.ReLU)), foreign.nothing),
        # The block never runs.
        (list_of(lambda: activated(8), past_the_block), None),
        (list_of(lambda: nn.Linear(8, 8), past_the_first), None),
    ],
    ids=["gelu", "relu", "bypassed", "lone and bypassed"],
)
def test_a_no_op_fails_if_recompute_would_free_memory_or_the_block_never_runs(workload, change):
    case = Case(workload, blocks="inner.?")
    verdict = verdict_of(
        recompute.compare_training, case, recompute_blocks=change or recompute_blocks
    )
    require(verdict, False, "nothing ran twice or was freed")


# Models that are right without recompute, and wrong with it.


class Faulty(nn.Module):
    """A block that `disturb` makes unfit for recompute."""

    def __init__(self, disturb):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.disturb = disturb
        self.cache = []
        self.calls = 0

    def forward(self, x):
        return x + torch.sin(self.disturb(self, torch.sigmoid(self.inner(x))))


def growing_cache(block, x):
    keys = torch.cat([*block.cache, x])
    block.cache.append(x.detach())
    return torch.sigmoid(keys).mean(0) * x


def counter(block, x):
    block.calls += 1
    return x * block.calls


def disturbed(disturb):
    """Build a workload whose second block of three is disturbed."""

    def build():
        clean = [Faulty(lambda block, x: x) for _ in range(2)]
        return nn.Sequential(nn.Linear(8, 8), nn.ModuleList(clean)[0], Faulty(disturb), clean[1])

    return squares(build, 8)


def all_but_the_unfit(model, *, blocks):
    return recompute_blocks(model, blocks=["1", "3"])


def test_a_block_that_torch_can_not_recompute_either_may_be_left_out():
    case = Case(disturbed(growing_cache))
    require(verdict_of(recompute.compare_training, case, recompute_blocks=all_but_the_unfit), True)


@pytest.mark.parametrize(
    ("disturb", "in_hint", "change"),
    [
        (lambda _, x: x * random.random(), "2 draws from python's generator", recompute_blocks),
        (
            lambda _, x: x * float(numpy.random.rand()),
            "2 draws from numpy's generator",
            recompute_blocks,
        ),
        (growing_cache, "computes other tensors the second time", foreign.by_checkpoint),
        (counter, "keeps state between calls", foreign.by_checkpoint),
    ],
)
def test_parity_names_the_block_that_is_unfit(disturb, in_hint, change):
    verdict = verdict_of(
        recompute.compare_training, Case(disturbed(disturb)), recompute_blocks=change
    )
    require(verdict, False, in_hint)


@pytest.mark.parametrize("why", ["does not repeat itself under it", "raises RuntimeError"])
def test_a_model_that_autocast_is_nothing_for_is_judged_without_it(why):
    """Its results differ each time, as of a kernel that reads too far, or it refuses."""
    calls = itertools.count()

    def run(blocks, x):
        if torch.is_autocast_enabled("cpu"):
            if "raises" in why:
                raise RuntimeError("for float32 alone")
            x = x + next(calls)
        return blocks[2](blocks[1](blocks[0](x)))

    made = squares(lambda: Runs(run, *(feed_forward(16, 64) for _ in range(3))), 16)
    verdict = verdict_of(recompute.compare_training, Case(made))
    assert verdict.passed, verdict
    assert verdict.measured.endswith(f"steps; without autocast: the plain model {why}")


def test_a_step_that_does_not_repeat_bit_for_bit_is_compared_with_a_tolerance():
    steps = itertools.count()

    def required(loss):
        case = Case(squares(lambda: stacked(lambda: activated(16), 2), 16, loss=loss))
        _, required, hint = same_training(case, lambda model, sample: recompute_blocks(model))
        assert not hint
        return required

    drifting = required(lambda model, batch: square_sum(model, batch) * (1 + 1e-6 * next(steps)))
    assert "does not repeat bit for bit" in drifting
    assert required(square_sum) == "bit-equal"
