"""Attach saving, resume, journal and spike recovery to a training loop that is not ours.

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

Proof: `python -m pytest tests/runs`.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..core.measure import peak_bytes
from .background import BackgroundSaver
from .files import Files, LocalFiles
from .history import run_facts
from .journal import Journal
from .layout import SavedCheckpoint
from .policy import SavingPolicy, number_of
from .policy_config import PolicyConfig, SpikeConfig
from .random_state import RandomState, restore_random_state, take_random_state
from .ranks import Ranks
from .resume import Resumed
from .spike import Recovered, Recoveries, Spike, SpikeWatchdog, recover
from .state import TrainingState, no_schedule_forgotten
from .store import Store

# ------------------------------------------------------------------------------
# Write the journal of a training run made by `saving`.
# ------------------------------------------------------------------------------


def require_disk(files: Files, runs: str | os.PathLike[str]) -> None:
    """Raise ValueError where the storage cannot append lines to a file."""
    if not isinstance(files, LocalFiles):
        raise ValueError(
            f"a journal needs a folder on a disk, and {runs} is not one: leave journal out"
        )


class AttachedJournal:
    """The journal of one process: rank 0 writes it with its own loss, read at every step."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: TrainingState,
        resumed: Resumed | None,
        *,
        config: PolicyConfig,
        ranks: Ranks,
    ) -> None:
        self._state = state
        self._config = config
        self._journal = Journal(folder, rank=ranks.rank)
        self._step = state.step
        self._since = time.perf_counter()
        self.before_step()

        self._device = next(
            (parameter.device for parameter in state.model.parameters()), torch.device("cpu")
        )
        facts = run_facts(
            {"checkpoint": asdict(config)}, device=self._device, world_size=ranks.size
        )
        if resumed is None and self._journal.empty:
            self._journal.start(facts=facts)
        else:
            self._journal.resume(
                state.step, facts=facts, checkpoint=resumed.saved.folder if resumed else None
            )

    def before_step(self) -> None:
        """Read the learning rate, because the loop may step its schedule before `after_step`."""
        rates = [
            float(group["lr"])
            for optimizer in self._state.optimizers
            for group in optimizer.param_groups
        ]
        self._rate = rates[0] if rates else 0.0

    def after_step(self, metrics: Mapping[str, Any]) -> None:
        """Write the step and the evaluation that happened since the last call."""
        step = self._state.step
        now = time.perf_counter()
        name = self._config.best_k_metric

        if step > self._step:
            if metrics.get("loss") is None:
                raise ValueError(
                    "a journal needs the loss of each step: "
                    "call run.step(loss=loss), or leave journal out"
                )
            self._journal.step(
                step,
                loss=number_of(metrics["loss"]),
                learning_rate=self._rate,
                seconds=now - self._since,
                peak_bytes=peak_bytes(self._device),
            )
            self._step = step
            self._since = now
            # A loop that does not take its batches from `run.batches` never calls `before_step`.
            self.before_step()

        if metrics.get(name) is not None:
            self._journal.write("eval", step=step, metric=name, value=number_of(metrics[name]))

    def spiked(self, spike: Spike) -> None:
        """Write a spike that the watchdog found; call after the journal has its step."""
        self._journal.write(
            "spike",
            step=spike.step,
            reason=spike.words,
            loss=spike.loss,
            first=spike.first,
            baseline=spike.baseline,
            limit=spike.limit,
        )

    def went_back(self, spike: Spike, done: Recovered, saved: Iterable[SavedCheckpoint]) -> None:
        """Write the rollback and the skipped batches, and end the journal of this process."""
        self.saved(saved)
        recovery = done.recovery
        self._journal.rollback(
            recovery.back_to,
            from_step=spike.step,
            reason=spike.words,
            checkpoint=done.resumed.saved.folder,
            number=recovery.attempt,
        )
        self._journal.write(
            "skip",
            step=recovery.back_to,
            reason=f"batches {recovery.start} to {recovery.stop - 1} of the run, "
            f"around the spike of step {spike.step}",
            start=recovery.start,
            stop=recovery.stop,
        )
        self.ended("spike")

    def ended(self, reason: str, saved: Iterable[SavedCheckpoint] = ()) -> None:
        """Write the last event and close the journal."""
        self.saved(saved)
        self._journal.write("stop", step=self._state.step, reason=reason[:1000])
        self._journal.close()

    def saved(self, saved: Iterable[SavedCheckpoint]) -> None:
        """Write an event for every committed checkpoint."""
        for checkpoint in saved:
            self._journal.write(
                "save",
                step=checkpoint.step,
                checkpoint=checkpoint.folder,
                num_bytes=checkpoint.num_bytes,
            )


# ------------------------------------------------------------------------------
# Save and restore the position in the training data, with any DataLoader.
# ------------------------------------------------------------------------------

logger = logging.getLogger(__name__)
# Prefix of the names under which the generators of a loader are saved.
DATA_PREFIX = "data-"
BatchT = TypeVar("BatchT")
_NO_BATCH: Any = object()


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
        self, loader: Iterable[BatchT], generators: dict[str, torch.Generator]
    ) -> Iterator[BatchT]:
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
            if next(iterator, _NO_BATCH) is _NO_BATCH:
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


# ------------------------------------------------------------------------------
# Detect loss spikes for `saving(spike=...)`, roll back and skip the batches around them.
# ------------------------------------------------------------------------------


class AttachedWatch:
    """The spike watchdog of a run made by `saving`; call its methods on all ranks together.

    `watchdog` exists and is saved even when nothing is watched, so that a later start can watch.
    """

    def __init__(self, spike: SpikeConfig | Mapping[str, Any] | None) -> None:
        if not isinstance(spike, SpikeConfig):
            spike = SpikeConfig(action="none") if spike is None else SpikeConfig.from_config(spike)
        if spike.lower_rate is not None:
            raise ValueError(
                "spike.lower_rate works only in the training project, because `saving` does not "
                "control the schedule of this loop: leave it out"
            )
        self.config = spike
        self.ranks = Ranks.on_the_host()
        group = None
        if self.ranks.size > 1:
            group = self.ranks.group or dist.group.WORLD
        self.watchdog = SpikeWatchdog(spike, group=group)
        self._judged = 0

    def begin(self, state: TrainingState, store: Store) -> None:
        """Read the step that the run resumes from, and the batches that it skips."""
        self._judged = state.step
        self._recoveries = Recoveries(store.files)

    def skips(self, position: int) -> bool:
        """Whether to skip the batch at this position, because it lies around an earlier spike."""
        return any(recovery.start <= position < recovery.stop for recovery in self._recoveries.done)

    def judge(self, step: int, loss: Any) -> Spike | None:
        """Return the spike that this step's loss completes, or None."""
        if self.config.action == "none" or step == self._judged:
            return None
        if loss is None:
            raise ValueError(
                "the watchdog needs the loss of each step: "
                "call run.step(loss=loss), or leave spike out"
            )
        self._judged = step
        spike = self.watchdog.observe(step, loss)
        if spike is not None and not self.config.rolls_back:
            self._warn(
                "spike: %s; with spike={'action': 'rollback'} the run rolls back", spike.words
            )
        return spike

    def go_back(
        self, spike: Spike, state: TrainingState, policy: SavingPolicy, data: DataPosition
    ) -> Recovered:
        """Load a state from before the spike and skip its batches from then on.

        Raises SpikeNotRecovered.
        """
        step = state.step
        position = state.position
        epoch = data.epoch

        def after(start: int, windows: int) -> int:
            """Return the position that lies so many windows of trained batches after `start`."""
            trained = sum(not self.skips(place) for place in range(state.position, position))
            remaining = round(windows * trained / (step - state.step))
            place = start
            while remaining or self.skips(place):
                remaining -= not self.skips(place)
                place += 1
            return place

        done = recover(
            spike,
            self.config,
            state=state,
            load=lambda what: policy.resume(state, what),
            after=after,
            recoveries=self._recoveries,
            write=self.ranks.first,
            go_on='saving(..., resume="{}") once, and without it afterwards',
        )
        if data.epoch < epoch and not any(
            name.startswith(DATA_PREFIX) for name in state.generators
        ):
            self._warn(
                "epoch %d will be shuffled again, in an order that depends on the model's random "
                "draws before it: give the loader a generator of its own, "
                "DataLoader(..., generator=torch.Generator())",
                epoch,
            )
        recovery = done.recovery
        self._warn(
            "spike: %s. Rolled back to %s: start again to go on without batches %d to %d "
            "(attempt %d of %d)",
            spike.words,
            done.resumed.saved.folder,
            recovery.start,
            recovery.stop - 1,
            recovery.attempt,
            self.config.attempts,
        )
        return done

    def _warn(self, message: str, *values: object) -> None:
        if self.ranks.first:
            logger.warning(message, *values)


# ------------------------------------------------------------------------------
# Record SIGTERM, so that a training loop can stop between two steps.
# ------------------------------------------------------------------------------


class Termination:
    """Sets `signal` to SIGTERM's number when it arrives; 0 until then.

    Only the main thread can handle signals; in another thread `signal` stays 0.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def release(self) -> None:
        """Restore the previous SIGTERM handler."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number: int, frame: Any) -> None:
        self.signal = number


# ------------------------------------------------------------------------------
# Save and resume an existing training loop with a few added lines.
# ------------------------------------------------------------------------------

ItemT = TypeVar("ItemT")
# Exit status 75 after a rollback: start the process again to continue the run.
RESTART_EXIT_STATUS = os.EX_TEMPFAIL
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
            notes[:] = [
                note for note in notes if not note.startswith(f"the generator {DATA_PREFIX}")
            ]

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

    def epochs(self, epochs: Iterable[ItemT]) -> Iterator[ItemT]:
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

    def batches(self, loader: Iterable[ItemT]) -> Iterator[ItemT]:
        """Iterate over the remaining batches of this pass over the loader."""
        self._check_loop_over_batches()
        if self._position.batch == 0 and (why := inexact(loader)):
            logger.warning("%s", why)
        self.state.generators |= {
            f"{DATA_PREFIX}{name}": generator for name, generator in generators_of(loader).items()
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

    def _remaining_batches(self, loader: Iterable[ItemT]) -> Iterator[ItemT]:
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
            sys.exit(128 + stop if stop else RESTART_EXIT_STATUS)

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
