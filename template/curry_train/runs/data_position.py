"""Save and restore the position in the training data, with any DataLoader.

The position consists of the epoch, the number of batches taken in it, and the states of the
generators at the beginning of the epoch. A resume restores these generator states, so that the
loader draws the same order. It then draws the batches that were already taken and discards them,
so that the workers of the loader advance to the same place.
Proof: `python -m pytest tests/test_attach.py`.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from .random_state import RandomState, restore_random_state, take_random_state

logger = logging.getLogger(__name__)
# Prefix of the names under which the generators of a loader are saved.
OF_DATA = "data-"
Batch = TypeVar("Batch")
_NOTHING: Any = object()


class DataPosition:
    """The position in the training data.

    `epoch` counts passes from 0, `batch` the batches taken in the current pass.
    """

    # Saved separately for every rank, because the generators of the ranks differ.
    of_each_rank = True

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self.began: RandomState | None = None

    def state_dict(self) -> dict[str, Any]:
        began = None
        if self.began is not None:
            began = {"tensors": dict(self.began.tensors), "values": dict(self.began.values)}
        return {"epoch": self.epoch, "batch": self.batch, "began": began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        began = state["began"]
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        self.began = None if began is None else RandomState(began["tensors"], began["values"])

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batch = 0
        self.began = None

    def iterator(
        self, loader: Iterable[Batch], generators: dict[str, torch.Generator]
    ) -> Iterator[Batch]:
        """Return an iterator over the remaining batches of this pass.

        On a resume the caller still has to restore the generators to their saved states.
        """
        if self.began is None:
            self.batch = 0
            self.began = take_random_state(generators)
        else:
            restore_random_state(self.began, generators)
        iterator = iter(loader)
        for number in range(self.batch):
            if next(iterator, _NOTHING) is _NOTHING:
                raise ValueError(
                    f"{self.batch} batches of epoch {self.epoch} were taken before the save, and "
                    f"the loader now has only {number}: use the data and the batch size of the "
                    f"saved run, or start a new run"
                )
        return iterator


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators that belong to a loader and its samplers."""
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
        if not isinstance(generator, torch.Generator):
            continue
        if all(generator is not other for other in found.values()):
            found[name] = generator
    return found


def inexact(loader: Any) -> str | None:
    """Return why a resume in the middle of a pass may not be exact; None if it is exact."""
    if getattr(loader, "num_workers", 0) and getattr(loader, "persistent_workers", False):
        return (
            "persistent_workers keep their generators from epoch to epoch, and a resumed run has "
            "new workers: random augmentation in them will differ; the order of the samples "
            "will not"
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        return (
            "in_order=False yields batches in the order in which the workers finish them, so a "
            "resumed run may skip other batches than those that were taken"
        )
    return None
