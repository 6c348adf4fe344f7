"""Workloads to train: a module, a batch of any size, and a loss that is a sum of terms.

A `Case` is one workload on a device, with the seed that makes it repeatable. `load_workload` finds
the built-in workloads, and makes one from a user's own model.

Proof: `python -m pytest tests/test_workload.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .batches import batch_size, map_tensors, take
from .untouched import seeded

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
            return self.workload.build().to(self.device, self.dtype).train()

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
