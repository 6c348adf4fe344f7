"""Faults of the chunked cross-entropy: options that are dropped, or wrong in one gradient.

Proof: `python -m pytest tests/gates/test_memory_plan.py`.
"""

import functools

import torch
from saboteurs import planted

from curry_train.primitives.cross_entropy import chunked_cross_entropy


def without(name):
    """Drop an option."""

    def dropped(*given, **options):
        options.pop(name, None)
        return chunked_cross_entropy(*given, **options)

    return dropped


def mean_over_all_tokens(hidden, weight, targets, *, reduction="mean", **options):
    if reduction != "mean":
        return chunked_cross_entropy(hidden, weight, targets, reduction=reduction, **options)
    total = chunked_cross_entropy(hidden, weight, targets, reduction="sum", **options)
    return total / len(targets)


def weights_that_do_not_divide(hidden, weight, targets, *, class_weights=None, **options):
    weigh = functools.partial(chunked_cross_entropy, hidden, weight, targets)
    if class_weights is None or options.get("reduction", "mean") != "mean":
        return weigh(class_weights=class_weights, **options)
    total = weigh(class_weights=class_weights, reduction="sum", **options)
    return total / (targets != -100).sum()


def probability_with_a_gradient(hidden, weight, targets, *, token_weights=None, **options):
    if not isinstance(token_weights, str) or options.get("reduction", "mean") != "mean":
        return chunked_cross_entropy(
            hidden, weight, targets, token_weights=token_weights, **options
        )
    losses = chunked_cross_entropy(hidden, weight, targets, reduction="none", **options)
    return (losses * torch.exp(-losses)).sum() / (targets != -100).sum()


FAULTS = [
    planted("memory-plan.loss-options", name, loss=loss, hint=hint, model="transformer")
    for name, loss, hint in (
        ("no-softcap", without("softcap"), "softcap"),
        ("no-z-loss", without("z_loss"), "z-loss"),
        ("no-smoothing", without("label_smoothing"), "label smoothing"),
        ("no-bias", without("bias"), "raised|a bias"),
        ("mean-over-all", mean_over_all_tokens, "off by"),
        ("weights-do-not-divide", weights_that_do_not_divide, "class weights"),
        ("probability-with-a-gradient", probability_with_a_gradient, "probability"),
    )
]
