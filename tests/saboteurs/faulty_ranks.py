"""Faults of runs on two ranks, which import them by name.

Proof: `python -m pytest tests/gates/test_two_ranks.py`.
"""

import contextlib
import copy
from unittest import mock

import torch
import torch.distributed as dist
from saboteurs import planted

from curry_train.primitives.grad_flow import GradFlow
from curry_train.primitives.recompute import recompute_blocks
from curry_train.runs import state
from curry_train.runs.attach import saving
from curry_train.runs.random_state import restore_random_state
from curry_train.runs.spike import SpikeWatchdog


def by_agreement(agreed):
    """Return `saving` whose watchdogs judge what `agreed(watchdog, loss)` returns."""

    def attach(*args, **options):
        with mock.patch.object(SpikeWatchdog, "_agreed", agreed), saving(*args, **options) as run:
            yield run

    return contextlib.contextmanager(attach)


def summed(watchdog, loss):
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def of_the_first(watchdog, loss):
    first = torch.tensor(loss, dtype=torch.float64)
    dist.broadcast(first, src=0)
    return float(first)


by_summed_loss = by_agreement(summed)
by_loss_of_first = by_agreement(of_the_first)


class OfOneRank(GradFlow):
    """A probe whose activations are those of its own rank."""

    def __enter__(self):
        super().__enter__()
        self._ranks = None
        return self


class OfOneShard(GradFlow):
    """A probe whose gradients and weights are those of its own shard."""

    def __enter__(self):
        divided = "curry_train.primitives.grad_flow_probe.is_divided"
        with mock.patch(divided, return_value=False):
            return super().__enter__()


def restored_from_first(random, generators=None):
    """Restore the generators that the first rank saved, on every rank."""
    shared = [random]
    dist.broadcast_object_list(shared, src=0)
    return restore_random_state(shared[0], generators)


@contextlib.contextmanager
def with_generators_of_first(*args, **options):
    """Attach `saving`, which restores the generators of the first rank."""
    with (
        mock.patch.object(state, "restore_random_state", restored_from_first),
        saving(*args, **options) as run,
    ):
        yield run


def without_own_moments(model, optimizer, **options):
    """Attach `saving`, and lose the moments of the second rank."""
    run = saving(model, optimizer, **options)
    for moments in optimizer.state.values() if dist.get_rank() else ():
        moments["exp_avg"].zero_()
    return run


def synced_again(model, *, blocks=None):
    """Recompute, and sum the gradient that enters each block over the ranks."""
    names = recompute_blocks(model, blocks=blocks)

    def sync(block, gradients):
        dist.all_reduce(gradients[0].clone())

    for name in names:
        model.get_submodule(name).register_full_backward_pre_hook(sync)
    return names


def with_own_weights(model, *, blocks=None):
    """Recompute the blocks with weights that no wrapper knows of."""
    names = recompute_blocks(model, blocks=blocks)
    for name in names:
        block = model.get_submodule(name)
        own = copy.deepcopy(block)
        block.forward = own.forward
    return names


FAULTS = [
    planted(
        "recompute.two-ranks",
        "synced-again",
        apply=f"{__name__}:synced_again",
        hint="collectives",
        model="mlp",
    ),
    planted(
        "recompute.two-ranks",
        "own-weights",
        apply=f"{__name__}:with_own_weights",
        hint="facts",
        model="mlp",
    ),
    planted(
        "loss-spike.two-ranks",
        "first-rank",
        attach=f"{__name__}:by_loss_of_first",
        hint="ended of rank 0",
    ),
    planted(
        "loss-spike.two-ranks",
        "summed-loss",
        attach=f"{__name__}:by_summed_loss",
        hint="loss 50.",
    ),
    planted(
        "grad-flow.two-ranks",
        "one-rank",
        probe=f"{__name__}:OfOneRank",
        hint="not outputs of",
        model="mlp",
    ),
    planted(
        "grad-flow.two-ranks",
        "one-shard",
        probe=f"{__name__}:OfOneShard",
        hint="FSDP2",
        model="mlp",
    ),
    planted(
        "checkpoint-policy.two-ranks",
        "one-generator",
        attach=f"{__name__}:with_generators_of_first",
        hint="of rank 0",
        model="mlp",
    ),
    planted(
        "checkpoint-policy.two-ranks",
        "moments-of-one",
        attach=f"{__name__}:without_own_moments",
        hint="of rank 1",
        model="mlp",
    ),
]
