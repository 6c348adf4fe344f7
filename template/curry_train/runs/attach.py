"""Saving and resuming for a training script that exists, in a few lines around its loop.

    run = saving(model, optimizer, scheduler, runs="runs/mine", rollback_every=100)    # resumes what is there
    for epoch in run.epochs(range(10)):
        for batch in run.batches(loader):
            ...                                                                        # the loop as it was
            run.step(loss=loss)
    run.close()

A save is made when the loop asks for the next batch, when all of its body is done: wherever the schedule is stepped,
the state is that between two steps. After SIGTERM the step is ended and saved, and the status is 143; where a loss
spike was gone back from it is 75. Started again, the run goes on.
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
TRY_AGAIN = os.EX_TEMPFAIL  # 75
WAIT_SECONDS = (
    5.0  # a process that was killed holds its lock until the kernel has given back its memory
)


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
    """Save this training into the folder `runs`, and go on where it was. Build everything as at the first start.

    `policy` takes the keys of the block `checkpoint:`. `extra` is anything else with `state_dict`. `resume=None` starts
    anew, in a folder where nothing is. With `journal` each loss is read and written, for `runs show`, `diff`, `plot`;
    with `spike`, the keys of the block `spike:`, each is judged.
    """
    no_schedule_forgotten(optimizer, scheduler, extra or {})
    config, position, watch = PolicyConfig.from_config(policy), DataPosition(), AttachedWatch(spike)
    held = {**(extra or {}), "data-position": position, "spike-watchdog": watch.watchdog}
    state = TrainingState(model, optimizer, scheduler, scaler, extra=held, generators=generators)
    return AttachedRun(state, position, watch, runs, config, resume, in_background, journal)


class AttachedRun:
    """Made by `saving`. Also a context, which closes it. `resumed` says what was loaded, `steps` how many were done."""

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
        self.state, self._position, self._watch = state, position, watch
        self.store = Store(runs)
        if journal:
            require_disk(self.store.files, runs)
        self.store.open(wait_seconds=WAIT_SECONDS)
        self._saver = BackgroundSaver(self.store) if in_background else None
        self.policy = SavingPolicy(self.store, config, saver=self._saver)
        self.resumed: Resumed | None = None if resume is None else self.policy.resume(state, resume)
        self._resuming = self.resumed is not None
        if self.resumed is not None:  # loaders make theirs known later
            notes = self.resumed.report.notes
            notes[:] = [note for note in notes if not note.startswith(f"the generator {OF_DATA}")]
        self._by_epochs = self._in_epoch = self._iterating = False
        self._metrics: dict[str, Any] | None = None
        self._ranks, self._open = watch.ranks, True
        watch.begin(state, self.store)
        own = (
            AttachedJournal(runs, state, self.resumed, config=config, ranks=watch.ranks)
            if journal
            else None
        )
        self._journal = own
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
        elif self._open:  # where it stopped is no place between two steps
            if self._journal is not None:
                self._journal.ended(f"{type(error).__name__}: {error}")
            self._release(kind, error, at)

    @property
    def steps(self) -> int:
        return self.state.step

    def epochs(self, epochs: Iterable[T]) -> Iterator[T]:
        """Those that are not done yet. What follows the loop over batches belongs to its epoch."""
        self._by_epochs, first = True, self._position.epoch
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
        """What is left of a pass over the loader."""
        if self._iterating:
            raise ValueError(
                "another loop over batches is open: only the loader that training follows goes in here"
            )
        if self._resuming and self._position.epoch and not self._by_epochs:
            raise ValueError(
                f"the run is in epoch {self._position.epoch}: write `for epoch in run.epochs(range(...))` around the "
                f"loop over batches, so that the epochs before are not trained again"
            )
        if self._position.batch == 0 and (why := inexact(loader)):
            logger.warning("%s", why)
        self.state.generators |= {
            f"{OF_DATA}{name}": one for name, one in generators_of(loader).items()
        }
        self._iterating = True
        try:
            if self._resuming and self._position.began is None:
                self.state.restore_random()
            elif not self._resuming and self._position.began is not None:
                if self._by_epochs:
                    raise ValueError(
                        "an epoch has one loop over batches: give it one loader, and the others none"
                    )
                self._position.begin_epoch(self._position.epoch + 1)
            iterator = self._position.iterator(loader, self.state.generators)
            if self._resuming and self._position.batch:
                self.state.restore_random()
            self._resuming = False
            for batch in iterator:
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

    def step(self, loss: Any = None, **metrics: Any) -> None:
        """After the optimizer's step, on every rank. Numbers or tensors, looked at only when something is due."""
        if self._watch.config.rolls_back and not self.state.position:
            raise ValueError(
                "spike.action=rollback skips batches: take them from run.batches(loader)"
            )
        self.state.step += 1
        self._metrics = (self._metrics or {}) | metrics | ({} if loss is None else {"loss": loss})
        self._save_between()

    def measured(self, **metrics: Any) -> None:
        """Figures that came after the step, such as `dev_loss` at the end of an epoch. Within a loop over epochs or
        batches one rank may say them for all."""
        self._metrics = (self._metrics or {}) | metrics
        self._save_between()

    def close(self) -> None:
        """Save the end, wait for it, and give the folder back."""
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
        metrics, self._metrics = self._metrics, None
        name = self.policy.config.best_k_metric
        measured = metrics is not None and metrics.get(name) is not None
        stop, stepped, measured_there = self._ranks.highest(
            [self._termination.signal, metrics is not None, measured]
        )
        if stepped:
            metrics = metrics or {}
            if (
                measured_there and self._ranks.size > 1
            ):  # on the first rank alone, as evaluation often is
                metrics[name] = self._ranks.exchange(
                    lambda: number_of(metrics[name]) if measured else None, _first
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
        """Before this step is saved. A loop that is not ours can't be sent to an earlier epoch, so the process ends."""
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
            self._saver.__exit__(
                *(raised or (None, None, None))
            )  # with an error nothing is asked of other ranks
        self.store.close()


def _first(every: list[float | None]) -> list[float | None]:
    return [next((value for value in every if value is not None), None)] * len(every)
