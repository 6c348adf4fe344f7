"""Batches and losses for modules, `(module, batch)` pairs and Hugging Face models.

Proof: `python -m pytest tests/test_workload.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .batches import batch_size, take
from .key_cache import no_cache_please

# The target that cross_entropy and Hugging Face models leave out of the loss.
IGNORED = -100
SEQUENCE_LENGTH = 64


@dataclass(frozen=True)
class Parts:
    """Functions that a `Workload` needs in addition to `build`."""

    # Makes a batch of the given number of samples.
    batch: Callable[[int], Any]
    # The loss summed over the terms of a batch.
    loss: Callable[[nn.Module, Any], Tensor]
    # The number of loss terms in a batch: valid labels or samples.
    count: Callable[[Any], int]
    # Makes rows of a batch differ in valid labels; None where the loss is per sample.
    mask: Callable[[Any], Any] | None
    # The size of the batch that the factory returned, if it returned one.
    own_batch: int | None


def workload_parts(made: Any) -> Parts:
    """Derive a batch, loss, count and mask from the return value of a factory."""
    if isinstance(made, nn.Module):
        module = made
        example = _example_batch(made)
    elif isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        module, example = made
    else:
        raise ValueError(
            f"the factory returned {type(made).__name__}; return an nn.Module, "
            "a (module, batch) pair or a Workload"
        )

    size = batch_size(example)
    has_labels = isinstance(example, Mapping) and "labels" in example
    is_causal = has_labels and type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return Parts(
        batch=lambda n: take(example, [row % size for row in range(n)]),
        loss=_causal_loss if is_causal else _output_loss,
        count=_count_labels if is_causal else batch_size,
        mask=_mask_labels if is_causal else None,
        own_batch=size if isinstance(made, tuple) else None,
    )


def call(module: nn.Module, batch: Any) -> Any:
    """Call a module on a batch, with its key-value cache off where it has one."""
    options = no_cache_please(module)
    if isinstance(batch, Mapping):
        return module(**options | dict(batch))
    if isinstance(batch, tuple | list):
        return module(*batch, **options)
    return module(batch, **options)


def _output_loss(module: nn.Module, batch: Any) -> Tensor:
    """Sum over samples the module's own mean loss, or else the mean square of its output."""
    output = call(module, batch)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif getattr(output, "loss", None) is not None:
        output = output.loss

    while isinstance(output, tuple | list | Mapping):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the module returned {type(output).__name__}, from which no loss can be computed; "
            "return a Workload"
        )

    if output.dim() == 0:
        return output * batch_size(batch)
    squares = output.float().square()
    return squares.flatten(1).mean(1).sum() if output.dim() > 1 else squares.sum()


def _causal_loss(module: nn.Module, batch: Any) -> Tensor:
    output = module(**{key: value for key, value in batch.items() if key != "labels"})
    return token_loss(output.logits[:, :-1], batch["labels"][:, 1:])


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross-entropy over all targets that are not ignored."""
    return F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _count_labels(batch: Any) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _mask_labels(batch: Any) -> Any:
    return {**batch, "labels": mask_tails(batch["labels"])}


def mask_tails(targets: Tensor) -> Tensor:
    """Ignore the ends of rows, so that rows differ in valid targets and have at least two."""
    rows, length = targets.shape
    valid = torch.linspace(2, length, rows, device=targets.device).round()
    positions = torch.arange(length, device=targets.device)
    return targets.masked_fill(positions >= valid[:, None], IGNORED)


def _example_batch(module: nn.Module) -> Any:
    """Make token ids for a Hugging Face model, else an input for the module's first layer."""
    vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)
    if vocabulary:
        tokens = torch.randint(vocabulary, (8, SEQUENCE_LENGTH))
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            return torch.randn(8, layer.in_features)
        if isinstance(layer, nn.Embedding):
            return torch.randint(layer.num_embeddings, (8, SEQUENCE_LENGTH))
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return torch.randn(8, layer.in_channels, *[32] * len(layer.kernel_size))
    raise ValueError(
        f"the input of {type(module).__name__} can't be inferred; return (module, batch)"
    )
