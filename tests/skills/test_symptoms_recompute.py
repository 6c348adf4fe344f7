"""Errors and changed training under recompute: reproduced, cured, not by the wrong fix.

python -m pytest tests/skills/test_symptoms_recompute.py
"""

from functools import partial

import pytest
import torch
from symptoms import (
    blocks,
    linear,
    mean_square,
    rows,
    seeded,
    step,
    symptom,
)
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from curry_train.core.parity import compare
from curry_train.primitives.recompute import CheckpointWrapper, Recompute, recompute_blocks


@pytest.fixture
def batch():
    return rows()


class Attend(nn.Module):
    """Attention without state: it takes keys, and returns them with new ones appended."""

    def __init__(self):
        super().__init__()
        self.key = linear()

    def forward(self, x, keys):
        keys = torch.cat([keys, self.key(x)])
        return x + torch.softmax(x @ keys.T, -1) @ keys, keys


class Cached(nn.Module):
    """Attention that stores the keys of earlier calls."""

    def __init__(self):
        super().__init__()
        self.attend, self.keys = Attend(), torch.zeros(0, 16)

    def forward(self, x):
        out, keys = self.attend(x, self.keys)
        self.keys = keys.detach()
        return out


def by_torch(block, **options):
    """Let torch's own checkpoint recompute a block."""
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return block


@symptom("`CheckpointError`: ... different metadata")
def test_a_cache_that_grows_breaks_torchs_checkpoint_and_not_recompute(batch):
    plain, whole, unchecked, cured = (seeded(Cached) for _ in range(4))
    with pytest.raises(CheckpointError, match="have different metadata"):
        step(by_torch(whole), batch)
    with pytest.raises(RuntimeError, match="returned an invalid gradient"):
        step(by_torch(unchecked, determinism_check="none"), batch)
    cured = Recompute(cured)
    for _ in range(2):  # the second step finds a filled cache
        assert compare(step(plain, batch), step(cured, batch)).bit_equal


class FrozenStart(nn.Module):
    """A model with nothing to train before its blocks, as with frozen embeddings under adapters."""

    def __init__(self, run=lambda block, x: block(x)):
        super().__init__()
        self.stem, self.block, self.head, self.run = (
            linear(),
            nn.Sequential(linear(), nn.GELU()),
            linear(),
            run,
        )
        self.stem.requires_grad_(False)

    def forward(self, x):
        return self.head(self.run(self.block, self.stem(x)))


def reentrant(block, *args):
    return checkpoint(block, *args, use_reentrant=True)


@symptom("`None of the inputs have requires_grad=True. Gradients will be None`")
def test_reentrant_checkpointing_of_a_frozen_start_loses_gradients(batch):
    plain, broken, cured = seeded(FrozenStart), seeded(FrozenStart, reentrant), seeded(FrozenStart)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        found = step(broken, batch)  # the loss is right and falls, since the head trains
    assert found.gradients["block.0.weight"] is None
    assert found.gradients["head.weight"] is not None
    cured.block = Recompute(cured.block)
    reference = step(plain, batch)
    assert compare(reference, step(cured, batch)).bit_equal
    cured = seeded(FrozenStart)
    cured.block = CheckpointWrapper(cured.block, use_reentrant=True)
    with pytest.raises(ValueError, match="leave use_reentrant at False"):
        step(cured, batch)


def test_blocks_that_are_compiled_already_are_refused():
    compiled = blocks(linear, nn.GELU, depth=2)
    compiled[0].compile(backend="aot_eager")
    with pytest.raises(ValueError, match="compiled already, and its compiled code would bypass"):
        recompute_blocks(compiled)


def test_weights_changed_before_backward_are_an_error_and_replaced_ones_are_restored(batch):
    block = Recompute(seeded(linear))
    loss = mean_square(block, batch)
    with torch.no_grad():
        block.bias.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place between the forward and its"):
        loss.backward()

    def gradient(*, replaced):
        layer = seeded(linear)
        block, weight = Recompute(nn.Sequential(layer, nn.Tanh())), layer.weight
        loss = mean_square(block, batch)
        if replaced:
            layer.weight = nn.Parameter(weight.detach() + 1)
        loss.backward()
        return weight.grad

    assert torch.equal(gradient(replaced=True), gradient(replaced=False))
