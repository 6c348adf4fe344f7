"""A short training for the gates of the checkpoint store.

Proof: `python -m pytest template/tests/test_checkpoint_policy.py`.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..core.untouched import seeded
from ..core.workload import Case
from .files import LocalFiles
from .manifest import Manifest
from .saved_run import SavedRun
from .state import TrainingState
from .writing import Writing


@dataclass(frozen=True)
class Parts:
    """The components of the store; the test of a gate replaces them with faulty ones."""

    state: Callable[..., Any] = TrainingState
    commit: Callable[[Writing, Any], Manifest] = Writing.commit
    verify: Callable[[SavedRun, str], Any] = SavedRun.verify
    load: Callable[[SavedRun, str, Any], Any] = SavedRun.load


SOUND = Parts()


class Interrupted(OSError):
    """Raised in place of a change on the disk."""


class InterruptedFiles(LocalFiles):
    """A local folder in which only the first `left` changes succeed."""

    # None for no limit.
    left: int | None = None

    def _change(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Interrupted("interrupted")

    def create(self, key: str) -> BinaryIO:
        self._change()
        return super().create(key)

    def finish(self, stream: BinaryIO) -> None:
        try:
            self._change()
        except Interrupted:
            # Only a part of the file reached the disk.
            stream.truncate(stream.tell() // 2)
            stream.close()
            raise
        # No sync is needed, because the trial simulates no power cut.
        stream.close()

    def rename(self, old: str, new: str) -> None:
        self._change()
        super().rename(old, new)

    def sync_folder(self, key: str) -> None:
        self._change()

    def remove_folder(self, key: str) -> None:
        self._change()
        super().remove_folder(key)


@contextlib.contextmanager
def trained(case: Case, parts: Parts) -> Iterator[tuple[Any, Path]]:
    """Yield a state after one step, and an empty folder; restore every generator afterwards."""
    with seeded(case.seed), tempfile.TemporaryDirectory(prefix="checkpoint-gate-") as folder:
        state = new_state(case, parts, seed=case.seed)
        train_step(case, state)
        yield state, Path(folder)


def new_state(case: Case, parts: Parts, *, seed: int) -> Any:
    """Make the state of a new model and optimizer."""
    model = replace(case, seed=seed).build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    return parts.state(model, optimizer)


def train_step(case: Case, state: Any) -> Tensor:
    """Train one step on a new batch, and return its loss."""
    loss = case.workload.mean_loss(state.model, case.place(case.workload.batch(case.batch_size)))
    loss.backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()
    state.step += 1
    return loss.detach()


def tensors_of(state: Any) -> dict[str, Tensor]:
    """Return copies of all tensors that a save writes."""
    return {name: tensor.clone() for name, tensor in TrainingState.snapshot(state).tensors.items()}


def same(first: Tensor, second: Tensor | None) -> bool:
    """Return whether two tensors are equal to the bit, with NaN equal to NaN."""
    return second is not None and (
        torch.equal(first, second) or bool((first.isnan() & second.isnan()).all())
    )
