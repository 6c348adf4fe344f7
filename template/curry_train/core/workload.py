"""What is trained: a module, a batch of any size, and a loss that is a sum of terms.

A `Case` is one workload on a device, with the seed that makes it repeatable. `load_workload` finds the built-in ones
and makes one of a user's own model. Proof: `python -m pytest tests/test_workload.py`.
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
    """What the user asked to train can't be trained as asked."""


@dataclass(frozen=True)
class Workload:
    """`loss(module, batch)` is the sum over the batch's `count(batch)` terms, so the mean is divided once, by whoever
    knows how many terms a whole window has. `build` and `batch` draw from torch's global generator.
    `mask(batch)` drops an uneven part of the terms, for models whose loss can be masked. `own_batch` are the samples of
    the batch that a factory gave.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int] = batch_size
    mask: Callable[[Batch], Batch] | None = None
    spec: str = ""
    own_batch: int | None = None

    def mean_loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return self.loss(module, batch) / self.count(batch)


@dataclass(frozen=True)
class Case:
    """One workload on one device: what a gate is measured on. `blocks` names those to work on, as a glob."""

    workload: Workload
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    batch_size: int = 4
    seed: int = 0
    blocks: str | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise WorkloadError(f"batch size must be at least 1, got {self.batch_size}")

    def build(self) -> nn.Module:
        """A module with the same weights each time."""
        with seeded(self.seed):
            return self.workload.build().to(self.device, self.dtype).train()

    def batch(self, size: int | None = None) -> Batch:
        """The same batch each time, on the device, floating-point parts in the case's dtype."""
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
        """Cut a batch into microbatches of these sizes, nothing left over."""
        if sum(sizes) != batch_size(batch):
            raise WorkloadError(
                f"sizes {list(sizes)} do not add up to a batch of {batch_size(batch)}"
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            take(batch, slice(start, start + size))
            for start, size in zip(starts, sizes, strict=True)
        ]
