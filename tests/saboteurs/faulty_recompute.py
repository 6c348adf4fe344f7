"""Faults of recompute and offload: too little, too much, or another value.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import copy
import functools
from collections import Counter

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

from curry_train import primitives
from curry_train.core.blocks import find_blocks
from curry_train.core.measure_compiled import with_own_code
from curry_train.gates import recompute as gates
from curry_train.primitives import memory_budget, recompute_blocks

from ..gates import foreign_recompute as foreign
from ..gates.foreign_recompute import around_blocks
from ..gates.foreign_sac import trains_in_eval_mode
from ..plan_models import squares
from ..toy_steps import feed_forward, stacked
from .saboteurs import planted

FROZEN_START = squares(lambda: stacked(lambda: feed_forward(8, 32), 3), 8, name="frozen start")


def recomputed_by(wrong, run, *args, **kwargs):
    """Recompute a block's call by another function of its forward and its arguments."""
    passes = []

    def again(*args, **kwargs):
        passes.append(None)
        return run(*args, **kwargs) if len(passes) == 1 else wrong(run, *args, **kwargs)

    return checkpoint(again, *args, use_reentrant=False, **kwargs)


def scaled(run, x, *args, **kwargs):
    return run(1.01 * x, *args, **kwargs)


def later(first_wrong, wrong=scaled):
    """Return a technique whose second run of a block is wrong from some call of the block on."""

    def change(model, *, blocks):
        num_calls = Counter()

        def around(run, *args, **kwargs):
            num_calls[run.__self__] += 1
            if num_calls[run.__self__] < first_wrong:
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            return recomputed_by(wrong, run, *args, **kwargs)

        around_blocks(model, blocks, around)

    return change


def without_autocast(run, *args, **kwargs):
    with torch.autocast("cpu", enabled=False):
        return run(*args, **kwargs)


def with_the_last_input(model, *, blocks):
    """Recompute each block from the input of its last forward, whichever backward runs."""
    last = {}

    def around(run, x, *args, **kwargs):
        last[run] = x
        return recomputed_by(from_the_last_input, run, x, *args, **kwargs)

    def from_the_last_input(run, x, *args, **kwargs):
        return run(last[run], *args, **kwargs)

    around_blocks(model, blocks, around)


def keeps_inputs(model, *, blocks):
    kept = []

    def around(run, x, *args, **kwargs):
        kept.append(x)
        return checkpoint(run, x, *args, use_reentrant=False, **kwargs)

    around_blocks(model, blocks, around)


in_training_mode = functools.partial(trains_in_eval_mode, change=foreign.by_checkpoint)


def in_place_of(technique, claim, name, change, hint):
    """Replace what the gates of segments and of a selection do to the blocks."""

    def apply(model, *_, blocks=None):
        names = list(find_blocks(model, blocks))
        change(model, blocks=names)
        return names

    return planted(f"recompute.{claim}", name, patches=[(gates, technique, apply)], hint=hint)


# Under DDP and FSDP2; the ranks import them by name.


def synced_again(model, *, blocks):
    """Recompute, and sum the gradient that enters each block over the ranks."""

    def sync(block, gradients):
        dist.all_reduce(gradients[0].clone())

    for name in recompute_blocks(model, blocks=blocks):
        model.get_submodule(name).register_full_backward_pre_hook(sync)


def with_own_weights(model, *, blocks):
    """Recompute the blocks with weights that no wrapper knows of."""
    for name in recompute_blocks(model, blocks=blocks):
        block = model.get_submodule(name)
        block.forward = copy.deepcopy(block).forward


# The compiler's memory budget.


def by_the_setting(model, budget, *, blocks, **_):
    """Let torch compile the blocks with its setting, which draws again."""

    def backend(graph, inputs):
        with functorch_config.patch(activation_memory_budget=budget):
            return lookup_backend("aot_eager")(graph, inputs)

    for name in blocks:
        block = model.get_submodule(name)
        code = with_own_code(block.forward, name="saboteur")
        block.forward = torch.compile(code, backend=backend)


def detached_with_a_budget(model, budget, *, blocks, **_):
    memory_budget(model, budget, blocks=blocks, backend="aot_eager")
    if budget < 1:
        block = model.get_submodule(blocks[0])
        block.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))


def parity(claim, name, change, **options):
    return planted(f"recompute.{claim}", name, recompute_blocks=change, **options)


def offload_fault(claim, name, change, hint, **options):
    return planted(f"recompute.{claim}", name, offload_blocks=change, hint=hint, **options)


def budget_fault(name, change, hint, **options):
    patches = [(primitives, "memory_budget", change)]
    return planted("recompute.budget", name, patches=patches, hint=hint, **options)


FAULTS = [
    parity("memory", "no-op", foreign.nothing, hint="too little", model="shrink=3:transformer"),
    parity(
        "memory",
        "first-block",
        foreign.first_block,
        hint="too little",
        model="shrink=3:transformer",
    ),
    parity("same-steps", "no-op", foreign.nothing, hint="nothing ran twice or was freed"),
    parity("same-steps", "other-dropout", foreign.other_dropout, model="dropout", hint="another"),
    parity("same-steps", "statistics-twice", foreign.by_checkpoint, model="resnet", hint="buffer"),
    parity(
        "same-steps",
        "reentrant",
        foreign.by_reentrant_checkpoint,
        model=FROZEN_START,
        hint="gets no gradient",
    ),
    parity("later-steps", "third-step", later(4), hint="step 3 of 3"),
    parity("later-steps", "two-forwards", with_the_last_input, hint="step 2 of 3"),
    parity("autocast", "forgotten", later(1, without_autocast), hint="step 3 of 3|metadata"),
    parity("every-block", "first-alone", foreign.first_block, hint="did not run again"),
    parity("no-leak", "keeps-inputs", keeps_inputs, hint="stay alive"),
    parity("flops", "no-op", foreign.nothing, hint="exactly once"),
    parity("flops", "twice", foreign.twice, hint="exactly once"),
    parity("off", "graph", foreign.also_in_evaluation, hint="no gradients"),
    parity("off", "training-mode", in_training_mode, hint="eval mode", model="dropout"),
    in_place_of("recompute_segments", "segments", "no-op", foreign.nothing, "nothing ran twice"),
    in_place_of("recompute_segments", "segments", "later", later(3), "another value"),
    in_place_of("recompute_blocks", "selective", "no-op", foreign.nothing, "nothing ran twice"),
    in_place_of(
        "recompute_blocks", "selective", "two-forwards", with_the_last_input, "another value"
    ),
    parity("two-ranks", "synced-again", synced_again, hint="collectives", model="mlp"),
    parity("two-ranks", "own-weights", with_own_weights, hint="not used in", model="mlp"),
    offload_fault("offload-parity", "no-op", foreign.nothing, "nothing ran twice or was freed"),
    offload_fault("offload-parity", "in-half", foreign.in_half, "another value"),
    offload_fault(
        "offload-bytes",
        "first-block",
        foreign.first_block_on_cpu,
        "stay on the device",
        model="shrink=3:transformer",
    ),
    offload_fault("offload-bytes", "recomputes", foreign.policy_of_torch, "this is recompute"),
    budget_fault("no-op", lambda *_, **__: None, "compile them"),
    budget_fault("other-draws", by_the_setting, "draws other random numbers", model="dropout"),
    budget_fault("detached", detached_with_a_budget, "recomputed values differ"),
]
