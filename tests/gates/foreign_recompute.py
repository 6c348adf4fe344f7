"""Recompute and offload on torch's own calls, as users write them, and wrong ones.

Proof: `python -m pytest tests/gates/test_foreign.py`.
"""

import functools

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    offload_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..language_models import language_model


def around_blocks(model, blocks, around):
    """Replace each block's forward by `around(forward, *args)`."""
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = functools.partial(around, block.forward)


# Recompute.


def by_checkpoint(model, *, blocks, use_reentrant=False, **options):
    again = functools.partial(checkpoint, use_reentrant=use_reentrant, **options)
    around_blocks(model, blocks, again)


by_reentrant_checkpoint = functools.partial(by_checkpoint, use_reentrant=True)


def by_wrapper(model, *, blocks):
    chosen = {model.get_submodule(name) for name in blocks}
    apply_activation_checkpointing(model, check_fn=chosen.__contains__)


def by_transformers(model, *, blocks, use_reentrant=False):
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


by_reentrant_transformers = functools.partial(by_transformers, use_reentrant=True)


def gpt2():
    torch.manual_seed(0)
    tokens = torch.randint(64, (4, 16))
    return language_model("GPT2", num_hidden_layers=3), {"input_ids": tokens, "labels": tokens}


def nothing(model, *, blocks):
    pass


def first_block(model, *, blocks):
    by_checkpoint(model, blocks=blocks[:1])


other_dropout = functools.partial(by_checkpoint, preserve_rng_state=False)


def also_in_evaluation(model, *, blocks):
    """Keep a graph where there is no backward."""

    def run(forward, *args):
        with torch.enable_grad():
            return checkpoint(forward, *args, use_reentrant=False)

    around_blocks(model, blocks, run)


def twice(model, *, blocks):
    by_checkpoint(model, blocks=blocks)
    by_checkpoint(model, blocks=blocks)


# Offload.


def on_cpu(model, *, blocks, pin_memory=False):
    saving_blocks(model, blocks, functools.partial(save_on_cpu, pin_memory=pin_memory))


on_pinned_cpu = functools.partial(on_cpu, pin_memory=True)


def by_offload_wrapper(model, *, blocks):
    for name in blocks:
        model.set_submodule(name, offload_wrapper(model.get_submodule(name)))


def saving_blocks(model, blocks, context):
    def run(forward, *args):
        with context():
            return forward(*args)

    around_blocks(model, blocks, run)


def first_block_on_cpu(model, *, blocks):
    on_cpu(model, blocks=blocks[:1])


def policy_of_torch(model, *, blocks):
    """Ask torch's policy for offload: in eager mode it recomputes instead."""
    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_CPU_OFFLOAD
    )
    by_checkpoint(model, blocks=blocks, context_fn=contexts)


in_half_context = functools.partial(
    saved_tensors_hooks,
    lambda tensor: (tensor.dtype, tensor.to("cpu", torch.bfloat16)),
    lambda kept: kept[1].to(kept[0]),
)


def in_half(model, *, blocks):
    saving_blocks(model, blocks, in_half_context)
