"""Where training is in its data, with any DataLoader: the epoch, the batches taken of it, and the generators as the
epoch began.

To come back, the generators are put to the beginning of the epoch, so that the loader draws the same order, and the
batches that were taken are drawn again and thrown away, so that workers are where they were as well.
Proof: `python -m pytest tests/test_attach.py`.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from .random_state import RandomState, restore_random_state, take_random_state

logger = logging.getLogger(__name__)
OF_DATA = "data-"  # begins the names of a loader's own generators
Batch = TypeVar("Batch")
_NOTHING: Any = object()


class DataPosition:
    """`epoch` counts passes from 0, `batch` those that were taken of this pass."""

    of_each_rank = True  # of their generators

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        self.began: RandomState | None = None

    def state_dict(self) -> dict[str, Any]:
        began = self.began and {
            "tensors": dict(self.began.tensors),
            "values": dict(self.began.values),
        }
        return {"epoch": self.epoch, "batch": self.batch, "began": began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        began = state["began"]
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.began = None if began is None else RandomState(began["tensors"], began["values"])

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.batch, self.began = epoch, 0, None

    def iterator(
        self, loader: Iterable[Batch], generators: dict[str, torch.Generator]
    ) -> Iterator[Batch]:
        """An iterator over what is left of this pass; the generators are then not yet those of the save."""
        if self.began is None:
            self.batch, self.began = 0, take_random_state(generators)
        else:
            restore_random_state(self.began, generators)
        iterator = iter(loader)
        for number in range(self.batch):
            if next(iterator, _NOTHING) is _NOTHING:
                raise ValueError(
                    f"{self.batch} batches of epoch {self.epoch} were taken before, and the loader has {number} now: "
                    f"go on with the data and the batch size of the save, or start a new run"
                )
        return iterator


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The generators that a loader and its samplers own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch-sampler": batch_sampler,
        "inner-sampler": getattr(batch_sampler, "sampler", None),
    }
    found: dict[str, torch.Generator] = {}
    for name, owner in owners.items():
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(
            generator is not other for other in found.values()
        ):
            found[name] = generator
    return found


def inexact(loader: Any) -> str | None:
    """Why a resume in the middle of this loader may not be exact, in words."""
    if getattr(loader, "num_workers", 0) and getattr(loader, "persistent_workers", False):
        return (
            "persistent_workers keep their generators from epoch to epoch, and a resumed run has new workers: random "
            "augmentation in them will differ; the order of the samples will not"
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        return "in_order=False hands out batches as they come, so a resumed run may skip others than were taken"
    return None
