"""A short training to try the store on, and the parts of the store that a test of a gate may replace.

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
    """What a gate's test may replace: how a state is taken, how a save is committed, how a checkpoint is verified and
    loaded."""

    state: Callable[..., Any] = TrainingState
    commit: Callable[[Writing, Any], Manifest] = Writing.commit
    verify: Callable[[SavedRun, str], Any] = SavedRun.verify
    load: Callable[[SavedRun, str, Any], Any] = SavedRun.load


SOUND = Parts()


class Interrupted(OSError):
    """What happens in the place of a change on the disk."""


class InterruptedFiles(LocalFiles):
    """A local folder on which the n-th change, and none after it, comes about."""

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
            stream.truncate(stream.tell() // 2)  # a part of it reached the disk
            stream.close()
            raise
        stream.close()  # without a sync: no power is cut here

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
    """A state after one step, and an empty folder; every generator is put back afterwards."""
    with seeded(case.seed), tempfile.TemporaryDirectory(prefix="checkpoint-gate-") as folder:
        state = new_state(case, parts, seed=case.seed)
        train_step(case, state)
        yield state, Path(folder)


def new_state(case: Case, parts: Parts, *, seed: int) -> Any:
    """A fresh model and optimizer."""
    model = replace(case, seed=seed).build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    return parts.state(model, optimizer)


def train_step(case: Case, state: Any) -> Tensor:
    """One step on a new batch; returns its loss."""
    loss = case.workload.mean_loss(state.model, case.place(case.workload.batch(case.batch_size)))
    loss.backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()
    state.step += 1
    return loss.detach()


def tensors_of(state: Any) -> dict[str, Tensor]:
    """Copies of all that is saved as tensors."""
    return {name: held.clone() for name, held in TrainingState.snapshot(state).tensors.items()}


def same(first: Tensor, second: Tensor | None) -> bool:
    """Equal to the bit, with NaN equal to NaN."""
    return second is not None and (
        torch.equal(first, second) or bool((first.isnan() & second.isnan()).all())
    )
