"""Selective checkpointing as users write it on torch's own API, and wrong twins of it."""

from collections import Counter
from functools import partial

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from . import foreign_recompute
from .foreign_recompute import around_blocks

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def checkpointed(model, blocks, context_fn, **options):
    def run(forward, *args):
        if not (forward.__self__.training and torch.is_grad_enabled()):
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **options)

    around_blocks(model, blocks, run)


def answer(keep):
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def saving(operations):
    """Return the contexts of a policy that saves these operations."""

    return partial(
        create_selective_checkpoint_contexts,
        lambda context, operation, *args, **kwargs: answer(operation in operations),
    )


def save_products(model, *, blocks):
    """Save matrix products and attention."""
    checkpointed(model, blocks, saving(PRODUCTS + ATTENTION))


def by_checkpoint(model, *, blocks):
    """Checkpoint in eval mode too, as torch does where nobody asks for the mode."""
    foreign_recompute.by_checkpoint(model, blocks=blocks, context_fn=saving(PRODUCTS + ATTENTION))


def every_second_product(model, *, blocks):
    """Save attention and every second matrix product, counted for each run of a block."""

    def contexts():
        num_products = Counter()

        def policy(context, operation, *args, **kwargs):
            if operation not in PRODUCTS:
                return answer(operation in ATTENTION)
            num_products[context.is_recompute] += 1
            return answer(num_products[context.is_recompute] % 2 == 1)

        return create_selective_checkpoint_contexts(policy)

    checkpointed(model, blocks, contexts, preserve_rng_state=True)


def by_wrapper(model, *, blocks):
    """Wrap each block, whose parameters get longer names."""
    for name in blocks:
        block = checkpoint_wrapper(
            model.get_submodule(name), context_fn=saving(PRODUCTS + ATTENTION)
        )
        model.set_submodule(name, block)


# Wrong twins.


def names_what_never_runs(model, *, blocks):
    names = [aten.linear.default, aten.scaled_dot_product_attention.default]
    checkpointed(model, blocks, saving(names))


def draws_again(model, *, blocks):
    checkpointed(model, blocks, saving(PRODUCTS + ATTENTION), preserve_rng_state=False)


def trains_in_eval_mode(model, *, blocks, change=save_products):
    for name in blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(lambda block, args: block.train() and None)
    change(model, blocks=blocks)
