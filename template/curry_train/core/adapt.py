"""How a module that is not ours is given batches and a loss: plain modules, `(module, batch)` pairs, Hugging Face.

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

IGNORED = -100  # the target that cross_entropy and Hugging Face models leave out of the loss
SEQUENCE_LENGTH = 64


@dataclass(frozen=True)
class Parts:
    """The functions that a `Workload` needs beside `build`."""

    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    count: Callable[[Any], int]
    mask: Callable[[Any], Any] | None
    own_batch: int | None


def workload_parts(made: Any) -> Parts:
    """Parts for what a factory returned."""
    if isinstance(made, nn.Module):
        module, example = made, _example_batch(made)
    elif isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        module, example = made
    else:
        raise ValueError(
            f"the factory returned {type(made).__name__}; return an nn.Module, a (module, batch) pair or a Workload"
        )
    size = batch_size(example)
    labels = isinstance(example, Mapping) and "labels" in example
    causal = labels and type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return Parts(
        batch=lambda n: take(example, [row % size for row in range(n)]),
        loss=_causal_loss if causal else _output_loss,
        count=_count_labels if causal else batch_size,
        mask=_mask_labels if causal else None,
        own_batch=size if isinstance(made, tuple) else None,
    )


def call(module: nn.Module, batch: Any) -> Any:
    quiet = no_cache_please(module)
    if isinstance(batch, Mapping):
        return module(**quiet | dict(batch))
    return module(*batch, **quiet) if isinstance(batch, tuple | list) else module(batch, **quiet)


def _output_loss(module: nn.Module, batch: Any) -> Tensor:
    """The sum over samples of whatever the module returns: its own mean loss, or the mean square of its output."""
    output = call(module, batch)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif getattr(output, "loss", None) is not None:
        output = output.loss
    while isinstance(output, tuple | list | Mapping):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the module returned {type(output).__name__}: no loss can be made of it; return a Workload"
        )
    if output.dim() == 0:
        return output * batch_size(batch)
    return (
        output.float().square().flatten(1).mean(1).sum()
        if output.dim() > 1
        else output.float().square().sum()
    )


def _causal_loss(module: nn.Module, batch: Any) -> Tensor:
    output = module(**{key: value for key, value in batch.items() if key != "labels"})
    return token_loss(output.logits[:, :-1], batch["labels"][:, 1:])


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over the targets that are not ignored."""
    return F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _count_labels(batch: Any) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _mask_labels(batch: Any) -> Any:
    return {**batch, "labels": mask_tails(batch["labels"])}


def mask_tails(targets: Tensor) -> Tensor:
    """Give each row another number of valid targets, at least two."""
    rows, length = targets.shape
    valid = torch.linspace(2, length, rows, device=targets.device).round()
    return targets.masked_fill(
        torch.arange(length, device=targets.device) >= valid[:, None], IGNORED
    )


def _example_batch(module: nn.Module) -> Any:
    """A batch for a bare module: token ids for a Hugging Face model, else what its first layer takes."""
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
        f"can't tell what {type(module).__name__} takes as input; return (module, batch)"
    )
