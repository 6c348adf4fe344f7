"""Save and resume an existing training loop with a few added lines.

    # Resumes if the folder already holds a saved state.
    run = saving(model, optimizer, scheduler, runs="runs/mine", rollback_every=100)
    for epoch in run.epochs(range(10)):
        for batch in run.batches(loader):
            ...  # the unchanged loop body
            run.step(loss=loss)
    run.close()

A save happens when the loop requests the next batch, after its whole body has run. The saved state
therefore always lies between two steps, wherever the loop steps its schedule. On SIGTERM the run
finishes the step, saves and exits with status 143; after rolling back from a loss spike it exits
with status 75. Restart the process to continue the run.
Proof: `python -m pytest tests/test_attach.py`.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from .attached_journal import AttachedJournal, require_disk
from .attached_spike import AttachedWatch
from .background import BackgroundSaver
from .data_position import OF_DATA, DataPosition, generators_of, inexact
from .health import number_of
from .optimizer_state import no_schedule_forgotten
from .policy import SavingPolicy
from .policy_config import PolicyConfig
from .resume import Resumed
from .spike_config import SpikeConfig
from .state import TrainingState
from .store import Store
from .termination import Termination

T = TypeVar("T")
logger = logging.getLogger(__name__)
# Exit status 75 after a rollback: start the process again to continue the run.
TRY_AGAIN = os.EX_TEMPFAIL
# A killed process holds its lock until the kernel has freed its memory.
WAIT_SECONDS = 5.0


def saving(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = None,
    *,
    runs: str | os.PathLike[str],
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    resume: str | int | None = "latest",
    in_background: bool = False,
    journal: bool = False,
    spike: SpikeConfig | Mapping[str, Any] | None = None,
    **policy: Any,
) -> "AttachedRun":
    """Save this training into the folder `runs`, and resume from the state saved there.

    Build the model, optimizer and scheduler exactly as at the first start.

    `policy` takes the keys of the config block `checkpoint:`. `extra` maps names to any other
    objects that have a `state_dict`. `resume=None` starts a new run and needs an empty folder.
    `journal` reads and records the loss of every step for `runs show`, `diff` and `plot`. `spike`
    takes the keys of the config block `spike:` and checks the loss of every step for spikes.
    """
    no_schedule_forgotten(optimizer, scheduler, extra or {})
    config = PolicyConfig.from_config(policy)
    position = DataPosition()
    watch = AttachedWatch(spike)

    saved_objects = {**(extra or {}), "data-position": position, "spike-watchdog": watch.watchdog}
    state = TrainingState(
        model, optimizer, scheduler, scaler, extra=saved_objects, generators=generators
    )
    return AttachedRun(state, position, watch, runs, config, resume, in_background, journal)


class AttachedRun:
    """A training run made by `saving`; close it, or use it as a context manager.

    `resumed` describes what was loaded, or is None. `steps` counts the optimizer steps done.
    """

    def __init__(
        self,
        state: TrainingState,
        position: DataPosition,
        watch: AttachedWatch,
        runs: str | os.PathLike[str],
        config: PolicyConfig,
        resume: str | int | None,
        in_background: bool,
        journal: bool,
    ) -> None:
        self.state = state
        self._position = position
        self._watch = watch

        self.store = Store(runs)
        if journal:
            require_disk(self.store.files, runs)
        self.store.open(wait_seconds=WAIT_SECONDS)
        self._saver = BackgroundSaver(self.store) if in_background else None
        self.policy = SavingPolicy(self.store, config, saver=self._saver)

        self.resumed: Resumed | None = None
        if resume is not None:
            self.resumed = self.policy.resume(state, resume)
        self._resuming = self.resumed is not None
        if self.resumed is not None:
            # Loaders register their generators later, in `batches`: drop the notes about those.
            notes = self.resumed.report.notes
            notes[:] = [note for note in notes if not note.startswith(f"the generator {OF_DATA}")]

        self._by_epochs = False
        self._in_epoch = False
        self._iterating = False
        self._metrics: dict[str, Any] | None = None
        self._ranks = watch.ranks
        self._open = True
        watch.begin(state, self.store)

        self._journal: AttachedJournal | None = None
        if journal:
            self._journal = AttachedJournal(
                runs, state, self.resumed, config=config, ranks=watch.ranks
            )
        self._termination = Termination()

    def __enter__(self) -> "AttachedRun":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._open:
            # Don't save: the exception may have left the state in the middle of a step.
            if self._journal is not None:
                self._journal.ended(f"{type(error).__name__}: {error}")
            self._release(kind, error, at)

    @property
    def steps(self) -> int:
        return self.state.step

    def epochs(self, epochs: Iterable[T]) -> Iterator[T]:
        """Iterate over the epochs that are not finished yet.

        Code after the loop over batches still belongs to its epoch.
        """
        self._by_epochs = True
        first = self._position.epoch
        for number, epoch in enumerate(epochs):
            if number < first:
                continue
            if number > first:
                self._position.begin_epoch(number)
            self._in_epoch = True
            yield epoch
            self._in_epoch = False
            self._position.begin_epoch(number + 1)
            self._save()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over the remaining batches of this pass over the loader."""
        self._check_loop_over_batches()
        if self._position.batch == 0 and (why := inexact(loader)):
            logger.warning("%s", why)
        self.state.generators |= {
            f"{OF_DATA}{name}": generator for name, generator in generators_of(loader).items()
        }

        self._iterating = True
        try:
            for batch in self._remaining_batches(loader):
                self._position.batch += 1
                self.state.position += 1
                if self._watch.skips(self.state.position - 1):
                    continue
                if self._journal is not None:
                    self._journal.before_step()
                yield batch
                self._save()
        finally:
            self._iterating = False

    def _check_loop_over_batches(self) -> None:
        if self._iterating:
            raise ValueError(
                "another loop over batches is open: pass only the training loader to run.batches()"
            )
        if self._resuming and self._position.epoch and not self._by_epochs:
            raise ValueError(
                f"the run is in epoch {self._position.epoch}: write "
                f"`for epoch in run.epochs(range(...))` around the loop over batches, so that "
                f"finished epochs are not trained again"
            )

    def _remaining_batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Restore the generators and return an iterator over the remaining batches."""
        if self._resuming and self._position.began is None:
            self.state.restore_random()
        elif not self._resuming and self._position.began is not None:
            if self._by_epochs:
                raise ValueError(
                    "an epoch has one loop over batches: "
                    "call run.batches() once per epoch, with the training loader"
                )
            self._position.begin_epoch(self._position.epoch + 1)

        iterator = self._position.iterator(loader, self.state.generators)
        if self._resuming and self._position.batch:
            self.state.restore_random()
        self._resuming = False
        return iterator

    def step(self, loss: Any = None, **metrics: Any) -> None:
        """Call after the optimizer's step, on every rank.

        The loss and metrics are numbers or tensors; they are read only when a save, the journal or
        the spike watchdog needs them.
        """
        if self._watch.config.rolls_back and not self.state.position:
            raise ValueError(
                "spike.action=rollback has to skip batches: take them from run.batches(loader)"
            )
        self.state.step += 1
        self._metrics = (self._metrics or {}) | metrics | ({} if loss is None else {"loss": loss})
        self._save_between()

    def measured(self, **metrics: Any) -> None:
        """Record metrics measured after the step, such as `dev_loss` at the end of an epoch.

        Inside a loop over epochs or batches it is enough to call this on one rank.
        """
        self._metrics = (self._metrics or {}) | metrics
        self._save_between()

    def close(self) -> None:
        """Save the final state, wait for the save and release the folder."""
        if self._open:
            self._close("closed")

    def _close(self, reason: str) -> None:
        try:
            self._save()
            saved = self.policy.save_now(self.state.step, self.state) if self.state.step else []
            if self._journal is not None:
                self._journal.ended(reason, saved)
        finally:
            self._release()

    def _save_between(self) -> None:
        if not self._iterating and not self._in_epoch:
            self._save()

    def _save(self) -> None:
        metrics = self._metrics
        self._metrics = None
        name = self.policy.config.best_k_metric
        measured_here = metrics is not None and metrics.get(name) is not None
        stop, stepped, measured_anywhere = self._ranks.highest(
            [self._termination.signal, metrics is not None, measured_here]
        )

        if stepped:
            metrics = metrics or {}
            if measured_anywhere and self._ranks.size > 1:
                # Evaluation often runs on rank 0 alone, so every rank needs its result.
                metrics[name] = self._ranks.exchange(
                    lambda: number_of(metrics[name]) if measured_here else None, _first
                )
            if self._journal is not None:
                self._journal.after_step(metrics)
            self._judge(metrics.get("loss"), stop)
            saved = self.policy.after_step(self.state.step, self.state, metrics)
            if self._journal is not None:
                self._journal.saved(saved)

        if stop:
            self._termination.signal = 0
            self._close(signal.Signals(stop).name)
            sys.exit(128 + stop)

    def _judge(self, loss: Any, stop: int) -> None:
        """Check the loss for a spike before this step is saved.

        A rollback ends the process, because it cannot send the caller's loop back to an earlier
        epoch.
        """
        spike = self._watch.judge(self.state.step, loss)
        if spike is not None and self._journal is not None:
            self._journal.spiked(spike)
        if spike is not None and self._watch.config.rolls_back:
            saved = self.policy.finish()
            back = self._watch.go_back(spike, self.state, self.policy, self._position)
            if self._journal is not None:
                self._journal.went_back(spike, back, saved)
            self._release()
            sys.exit(128 + stop if stop else TRY_AGAIN)

    def _release(self, *raised: Any) -> None:
        self._open = False
        self._termination.release()
        if self._saver is not None:
            # With an exception the saver closes without communicating with other ranks.
            self._saver.__exit__(*(raised or (None, None, None)))
        self.store.close()


def _first(values: list[float | None]) -> list[float | None]:
    """Give every rank the first value that is not None."""
    measured = next((value for value in values if value is not None), None)
    return [measured] * len(values)
