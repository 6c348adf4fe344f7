"""The user's model as the tools use it: module, batch and loss, adapted from what was given.

A `Case` is one workload on a device, with the seed that makes it repeatable. `load_workload` finds
the built-in workloads, and makes one from a user's own model.

Proof: `python -m pytest tests/workloads/test_workload.py`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.blocks import class_as_written
from ..core.rerun import seeded
from ..primitives.cross_entropy import IGNORED_TARGET

# Nested batches of tensors, cut along the leading dimension.


def map_tensors(
    batch: Any,
    function: Callable[[Tensor], Any],
    *,
    move: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Apply `function` to every tensor of a nested batch; containers keep their types.

    `move` is applied to other objects with a method `to`, such as packed sequences and graphs.
    Everything else is returned unchanged.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function, move=move) for key, value in batch.items()}
        return type(batch)(mapped) if isinstance(batch, dict) else mapped
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return move(batch)
    if isinstance(batch, tuple | list):
        values = [map_tensors(value, function, move=move) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if is_dataclass(batch) and not isinstance(batch, type):
        changed = {}
        for part in fields(batch):
            if part.init:
                changed[part.name] = map_tensors(getattr(batch, part.name), function, move=move)
        return replace(batch, **changed)
    return batch


def batch_size(batch: Any) -> int:
    """Return the leading dimension of the first tensor that has one."""
    sizes: list[int] = []
    map_tensors(batch, lambda tensor: sizes.append(tensor.shape[0]) if tensor.dim() else None)
    if not sizes:
        raise ValueError(
            "a batch must hold at least one tensor with a batch dimension, "
            f"got {type(batch).__name__}"
        )
    return sizes[0]


def take(batch: Any, rows: slice | list[int]) -> Any:
    """Select samples from a batch; tensors with another leading dimension are shared."""
    map_tensors(batch, lambda tensor: tensor, move=_refuse_to_divide)
    size = batch_size(batch)
    return map_tensors(
        batch, lambda tensor: tensor[rows] if tensor.dim() and tensor.shape[0] == size else tensor
    )


def _refuse_to_divide(value: Any) -> Any:
    raise ValueError(
        f"a {type(value).__name__} can't be divided into samples: return a Workload whose batch "
        "makes one of any size"
    )


# Workloads to train: a module, a batch of any size, and a loss that is a sum of terms.

Batch = Any


class WorkloadError(ValueError):
    """A workload that can't be trained as the user asked."""


@dataclass(frozen=True)
class Workload:
    """A model with its batches and its loss.

    The loss is a sum over terms, so that the mean is divided only once, by the number of terms of a
    whole window. `build` and `batch` draw from torch's global generator.
    """

    name: str
    build: Callable[[], nn.Module]

    # Makes a batch of a given size.
    batch: Callable[[int], Batch]

    # The sum of the loss over the terms of a batch.
    loss: Callable[[nn.Module, Batch], Tensor]

    # The number of terms in a batch.
    count: Callable[[Batch], int] = batch_size

    # Drops an uneven part of the terms, for models whose loss can be masked.
    mask: Callable[[Batch], Batch] | None = None

    # The text from which the workload was loaded.
    spec: str = ""

    # The number of samples in the batch that a user's factory returned.
    own_batch: int | None = None

    def mean_loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return self.loss(module, batch) / self.count(batch)


@dataclass(frozen=True)
class Case:
    """One workload on one device, on which a gate is measured."""

    workload: Workload
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    batch_size: int = 4
    seed: int = 0

    # A glob over the names of the blocks to work on.
    blocks: str | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise WorkloadError(f"batch size must be at least 1, got {self.batch_size}")

    def build(self) -> nn.Module:
        """Build a module, with the same weights each time."""
        with seeded(self.seed):
            module = self.workload.build()
        tensors = [*module.parameters(), *module.buffers()]
        if not any(tensor.is_complex() for tensor in tensors):
            return module.to(self.device, self.dtype).train()
        # `Module.to(dtype)` would drop the imaginary parts.
        module.to(self.device)
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(self.dtype)
        return module.train()

    def batch(self, size: int | None = None) -> Batch:
        """Make the same batch each time, on the device and in the case's dtype."""
        with seeded(self.seed + 1):
            return self.place(self.workload.batch(self.batch_size if size is None else size))

    def place(self, batch: Batch) -> Batch:
        return map_tensors(
            batch,
            lambda tensor: tensor.to(
                self.device, self.dtype if tensor.is_floating_point() else None
            ),
            move=lambda value: value.to(self.device),
        )

    def split(self, batch: Batch, sizes: Sequence[int]) -> list[Batch]:
        """Split a batch into microbatches of these sizes, which must add up to the batch."""
        if sum(sizes) != batch_size(batch):
            raise WorkloadError(
                f"sizes {list(sizes)} do not add up to a batch of {batch_size(batch)}: give sizes "
                "that do"
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            take(batch, slice(start, start + size))
            for start, size in zip(starts, sizes, strict=True)
        ]


# Batches and losses for modules, `(module, batch)` pairs and Hugging Face models.

SEQUENCE_LENGTH = 64


@dataclass(frozen=True)
class WorkloadFunctions:
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


def workload_parts(made: Any) -> WorkloadFunctions:
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
    return WorkloadFunctions(
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


def without_cache(module: nn.Module) -> nn.Module:
    """Switch the cache off in the configuration of every submodule, and return the module."""
    for submodule in module.modules():
        if _caches(submodule):
            config: Any = submodule.config
            config.use_cache = False
    return module


def no_cache_please(module: nn.Module) -> dict[str, bool]:
    """Return the keyword argument that switches the cache off for one call, if there is one."""
    if not _caches(module):
        return {}
    written: Any = class_as_written(module)
    accepted = inspect.signature(written.forward).parameters
    return {"use_cache": False} if "use_cache" in accepted else {}


def _caches(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    bases = type(config).__mro__
    is_hugging_face = any(base.__module__.startswith("transformers.") for base in bases)
    return is_hugging_face and getattr(config, "use_cache", None) is True


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
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORED_TARGET,
        reduction="sum",
    )


def _count_labels(batch: Any) -> int:
    return int((batch["labels"][:, 1:] != IGNORED_TARGET).sum())


def _mask_labels(batch: Any) -> Any:
    return {**batch, "labels": mask_tails(batch["labels"])}


def mask_tails(targets: Tensor) -> Tensor:
    """Ignore the ends of rows, so that rows differ in valid targets and have at least two."""
    rows, length = targets.shape
    valid = torch.linspace(2, length, rows, device=targets.device).round()
    positions = torch.arange(length, device=targets.device)
    return targets.masked_fill(positions >= valid[:, None], IGNORED_TARGET)


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
