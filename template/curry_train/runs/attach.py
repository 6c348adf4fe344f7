"""Attach saving, resume, journal and spike recovery to any training loop.

    # Resumes if the folder already holds a saved state.
    run = saving(model, optimizer, scheduler, runs="runs/mine", rollback_every=100)
    for epoch in run.epochs(range(10)):
        for batch in run.batches(loader):
            ...  # the unchanged loop body
            run.step(loss=loss)
    run.close()

With a DataLoader a save happens when the loop requests the next batch, after its whole body has
run. The saved state therefore always lies between two steps, wherever the loop steps its schedule.
On SIGTERM the run finishes the step, saves and exits with status 143; after rolling back from a
loss spike it exits with status 75. Restart the process to continue the run.

With data that resume from one integer the loop stays in charge: `run.step` saves at once, a spike
is rolled back in the same process, and a signal ends the loop instead of the process.

    with saving(model, optimizer, runs="runs/mine", stream=stream, journal=True) as run:
        windows = accumulation.windows(stream, count=num_tokens)
        while run.continues(until=1000):
            result = train_window(model, next(windows), summed_loss, optimizer)
            run.step(loss=result.loss)
    sys.exit(run.exit_status)

Proof: `python -m pytest tests/runs`.
"""

import contextlib
import itertools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from .background import BackgroundSaver
from .box import Boxes
from .files import StrPath
from .history import peak_bytes, run_facts
from .journal import Journal
from .policy import SavingPolicy, number_of
from .policy_config import BoxConfig, PolicyConfig, SpikeConfig, read_fields
from .random_state import DATA_PREFIX, DataPosition, generators_of, inexact
from .ranks import Ranks
from .replay import NOTHING_SAVED, Replay
from .resume import Resumed
from .spike import AttachedWatch, SampleStream, Spike
from .state import TrainingState
from .store import SavedRun, Store
from .values import Facts, Values

# What the loop reports of a step, and the journal of it.


@dataclass
class StepNotes:
    """The figures that the loop reported since the last save."""

    # Figures that the policy may compare and save by: numbers or tensors.
    metrics: Facts = field(default_factory=dict)
    # Figures for the journal only, which may be infinite in sound training.
    figures: Facts = field(default_factory=dict)
    # Whether a step was done, and not only measured.
    is_step: bool = False
    # False if a gradient scaler skipped the step.
    stepped: bool = True


class AttachedJournal(Journal):
    """The journal of one process: rank 0 writes it with its own loss, read at every step.

    Nothing is written or read where it is off.
    """

    def __init__(self, run: "AttachedRun", *, on: bool) -> None:
        self._run = run
        self._on = on
        self.begin_step()
        ranks = Ranks()
        facts: Facts = {}
        if on:
            parameter = next(run.state.model.parameters(), torch.empty(0))
            self._device = parameter.device
            config = run.state.config or {"checkpoint": asdict(run.policy.config)}
            facts = run_facts(config, device=self._device, world_size=ranks.size)
        if run.resumed is not None:
            facts |= {"checkpoint": run.resumed.saved.folder, "notes": run.resumed.notes}
        rank = ranks.rank if on else 1
        super().__init__(run.store.root, step=run.steps, facts=facts, rank=rank)

    def begin_step(self) -> None:
        """Start the time of the next step, so that saves do not count as training."""
        self._since = time.perf_counter()
        self.read_rate()

    def read_rate(self) -> None:
        """Read the learning rate, because the loop may step its schedule before `after_step`."""
        if self._on:
            groups = [group for one in self._run.state.optimizers for group in one.param_groups]
            self._rate = float(groups[0]["lr"]) if groups else 0.0

    def after_step(self, notes: StepNotes) -> None:
        """Write the step and the evaluation that happened since the last call."""
        step = self._run.steps
        if not self._on:
            return
        if notes.is_step:
            if notes.metrics.get("loss") is None:
                raise ValueError(
                    "a journal needs the loss of each step: "
                    "call run.step(loss=loss), or leave journal out"
                )
            figures: Facts = {
                "learning_rate": self._rate,
                "seconds": time.perf_counter() - self._since,
                "peak_bytes": peak_bytes(self._device),
                "epoch": getattr(self._run.data, "epoch", None),
            }
            figures |= notes.figures
            self.write("step", step=step, loss=number_of(notes.metrics["loss"]), **figures)
        if not notes.stepped:
            self.write(
                "skip", step=step, reason="a gradient was not finite, and the scale is lowered"
            )
        for name, value in notes.metrics.items():
            if name != "loss" and value is not None:
                self.write("eval", step=step, metric=name, value=number_of(value))

    def ended(self, reason: str) -> None:
        """Write the last event."""
        self.write("stop", step=self._run.steps, reason=reason[:1000])


# End a training loop between two steps, on a signal or on request.

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """A signal to end the training after the current step; the first one counts.

    It handles `signals` until `release`; a second SIGINT interrupts at once. Only the main thread
    can handle signals.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        # The signal that was received, or 0.
        self.number = 0
        is_main = threading.current_thread() is threading.main_thread()
        handled = signals if is_main else ()
        self._previous = {number: signal.signal(number, self._handle_signal) for number in handled}
        # So that its parent can terminate a forked child.
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Restore the previous handlers, except where the program has set its own meanwhile."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle_signal:
                signal.signal(number, handler)
        self._previous = {}

    def _handle_signal(self, number: int, frame: Any) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number


# Save and resume a training loop with a few added lines.

logger = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")
# Exit status 75 after a rollback: start the process again to continue the run.
RESTART_EXIT_STATUS = os.EX_TEMPFAIL
# A killed process holds its lock until the kernel has freed its memory.
WAIT_SECONDS = 10.0


class AttachedRun:
    """Save this training into the folder `runs`, and resume from the state saved there.

    Build the model, optimizer and scheduler exactly as at the first start. `policy` takes the keys
    of the config block `checkpoint:`. `extra` maps names to any other objects that have a
    `state_dict`. `resume=None` starts a new run and needs an empty folder. `journal` reads and
    records the loss of every step for `runs show`, `diff` and `plot`; `config` is recorded with it
    and with every state. `spike` takes the keys of the config block `spike:` and checks every loss.
    `box` keeps each bad step in a folder for `curry-train runs replay`; it takes the keys of the
    block `box:`, and checks the losses as `spike` does.

    `stream` is data that resume from one integer, such as a `curry_train.data.Stream`; the loop
    then calls `continues` and `step`, and spikes are rolled back in this process. `keep_settings`
    keeps the optimizer's settings of this start (learning rate, weight decay) where the saved ones
    differ.

    Close it, or use it as a context manager. `resumed` describes what was loaded, or is None.
    `steps` counts the optimizer steps done. `ended_by` is None until the loop ends: "steps", "data"
    or the name of a signal.
    """

    ended_by: str | None = None
    # With a DataLoader: the number of steps at which the loop ends.
    _until = math.inf
    _in_epoch = False
    _iterating = False
    # Whether the log says already that a resume may not be exact.
    _warned = False
    # Whether a best-K could be chosen by any figure.
    _chooses = False
    _open = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        scheduler: Any = None,
        *,
        runs: StrPath,
        scaler: Any = None,
        extra: Values | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        stream: SampleStream | None = None,
        resume: str | int | None = "latest",
        keep_settings: bool = False,
        in_background: bool = False,
        journal: bool = False,
        config: Values | None = None,
        spike: SpikeConfig | Values | None = None,
        box: bool | BoxConfig | Values = False,
        **policy: Any,
    ) -> None:
        replay = Replay.current
        boxes = BoxConfig(keep=0)
        if replay is not None:
            runs, resume = replay.root, replay.facts.checkpoint
            journal, in_background, spike, policy = False, False, None, NOTHING_SAVED
        elif box:
            boxes = read_fields(BoxConfig, {} if box is True else box, inside="box")
            spike = SpikeConfig() if spike is None else spike
        policy_config = read_fields(PolicyConfig, policy, inside="checkpoint")
        data: SampleStream = DataPosition() if stream is None else stream
        self.data = data
        # A loop over a DataLoader can't be sent back or ended from here: the process ends instead.
        self._has_loader = stream is None
        self._watch = AttachedWatch(spike, data)
        self._ranks = self._watch.ranks
        self._notes = StepNotes()
        # Names that `measured` was given.
        self._measured: set[str] = set()

        saved_objects = {**(extra or {}), "spike-watchdog": self._watch}
        if isinstance(data, DataPosition):
            saved_objects["data-position"] = data
        state = self.state = TrainingState(
            model,
            optimizer,
            scheduler,
            scaler,
            config=config,
            extra=saved_objects,
            generators=generators,
        )
        state.keeps_settings = keep_settings
        state.require_schedule()
        # Ctrl-C interrupts a loop over a DataLoader as before.
        self._stop = Stop(STOP_SIGNALS[:1] if self._has_loader else STOP_SIGNALS)
        with contextlib.ExitStack() as undo:
            # First, so last at the end: the last save may be under way until then, and a signal
            # must not end the process.
            undo.callback(self._stop.release)
            # Ranks may reach the folder by different paths, or start in different folders.
            store = self.store = Store(self._ranks.agree(lambda: SavedRun(runs).root))
            undo.callback(store.close)
            store.open(wait_seconds=WAIT_SECONDS)
            # After an exception it closes without communicating with other ranks.
            saver = undo.enter_context(BackgroundSaver(store)) if in_background else None
            self.policy = SavingPolicy(store, policy_config, saver=saver)
            state.position = data.position
            self.resumed = None
            if resume is None:
                self.policy.begin(state)
            else:
                self.resumed = self._load(resume)
            self._resuming = self.resumed is not None and self.resumed.saved.is_state
            self._watch.begin(store.root)
            self._boxes: Boxes | Replay | None = replay
            if replay is not None:
                replay.state = state
            elif boxes.keep:
                self._boxes = Boxes(boxes, store, state, patience=self._watch.config.patience)
            if self._boxes is not None and hasattr(data, "on_batch"):
                data.on_batch = self._boxes.hand_out
            self._journal = self._ranks.all_do(lambda: AttachedJournal(self, on=journal))
            self.policy.record = self._journal.write
            # The folder, the background saver and the signals, until the end.
            self.resources = undo.pop_all()

    def __enter__(self) -> "AttachedRun":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if error is None:
            self.close()
        elif self._open:
            # Don't save: the exception may have left the state in the middle of a step.
            self._journal.ended(f"{type(error).__name__}: {error}")
            self._release(kind, error, at)

    @property
    def steps(self) -> int:
        return self.state.step

    @property
    def exit_status(self) -> int:
        """The status for `sys.exit`: 128 plus the signal that ended the loop, else 0."""
        number = signal.Signals.__members__.get(self.ended_by or "")
        return 0 if number is None else 128 + number

    def continues(self, *, until: int) -> bool:
        """Return whether to train another step; call it on every rank.

        With a stream, before each step; False once `until` steps are done, or a signal has reached
        any rank. With a DataLoader, before each pass, which `run.batches` then ends at `until`.
        """
        # An earlier call may have ended the loop at fewer steps.
        self.ended_by = "steps" if self.steps >= until else None
        if self._has_loader:
            self._until = until
            return self.ended_by is None
        if self._resuming:
            # Code between `saving` and the first step may have drawn random numbers.
            self.state.restore_random()
            self._resuming = False
        if self._boxes is not None:
            self._boxes.begin()
        # A signal that reached any rank ends all.
        number = self._ranks.highest([self._stop.number])[0]
        if number and self.ended_by is None:
            self.ended_by = signal.Signals(number).name
        return self.ended_by is None

    def epochs(self, epochs: Iterable[ItemT]) -> Iterator[ItemT]:
        """Iterate over the epochs that are not finished yet.

        Code after the loop over batches still belongs to its epoch.
        """
        position = self._require_loader("run.epochs")
        for number, epoch in itertools.islice(enumerate(epochs), position.epoch, None):
            self._in_epoch = True
            yield epoch
            self._in_epoch = False
            position.begin_epoch(number + 1)
            self._save()

    def batches(self, loader: Iterable[ItemT]) -> Iterator[ItemT]:
        """Iterate over the remaining batches of this pass over the loader."""
        position = self._require_loader("run.batches")
        if self._iterating:
            raise ValueError(
                "another loop over batches is open: pass only the training loader to run.batches()"
            )
        has_passes = self._in_epoch or self._until < math.inf
        if self._resuming and position.epoch and not has_passes:
            raise ValueError(
                f"the run is in epoch {position.epoch}: put `for epoch in run.epochs(range(...))` "
                "around the loop over batches, so that finished epochs are not trained again"
            )
        # End here if a signal came before the first step, which can take minutes.
        self._save()
        if position.batch == 0 and not self._warned and (why := inexact(loader)):
            logger.warning("%s", why)
            self._warned = True
        self.state.generators |= {
            f"{DATA_PREFIX}{name}": generator for name, generator in generators_of(loader).items()
        }

        self._iterating = True
        try:
            is_done = self.steps >= self._until
            for batch in () if is_done else self._iterate_remaining(position, loader):
                if position.advance():
                    self._journal.read_rate()
                    yield batch if self._boxes is None else self._boxes.hand_out(batch)
                    self._save()
                # The batch after the last step is not drawn, so that a later start may train on.
                if self.steps >= self._until:
                    break
        finally:
            self._iterating = False

    def _iterate_remaining(
        self, position: DataPosition, loader: Iterable[ItemT]
    ) -> Iterator[ItemT]:
        """Restore the generators and return an iterator over the remaining batches."""
        if self._resuming and position.began is None:
            self.state.restore_random()
        elif not self._resuming and position.began is not None:
            if self._in_epoch:
                raise ValueError(
                    "an epoch has one loop over batches: "
                    "call run.batches() once per epoch, with the training loader"
                )
            position.begin_epoch(position.epoch + 1)

        iterator = position.iterator(loader, self.state.generators)
        if self._resuming and position.batch:
            self.state.restore_random()
        self._resuming = False
        return iterator

    def step(
        self,
        loss: Any = None,
        *,
        stepped: bool = True,
        figures: Values | None = None,
        **metrics: Any,
    ) -> bool:
        """Call after the optimizer's step, on every rank.

        The loss and metrics are numbers or tensors; they are read only when a save, the journal or
        the spike watchdog needs them. `figures` go to the journal only, such as the norm of the
        gradients. `stepped=False` is for a step that a gradient scaler skipped. Returns False if
        the run was rolled back to before this step.
        """
        if not self._open:
            raise ValueError("the run is closed: its folder may have another writer by now")
        if self._has_loader and self._watch.config.rolls_back and not self.data.position:
            raise ValueError(
                "spike.action=rollback has to skip batches: take them from run.batches(loader)"
            )
        if self._until < math.inf and not self._iterating:
            raise ValueError(
                "run.continues(until=...) needs data that resume from one integer: call "
                "saving(..., stream=stream), or take the batches from run.batches(loader)"
            )
        self.state.step += 1
        if isinstance(self.data, DataPosition):
            self.data.stepped()

        notes = self._notes
        notes.is_step = True
        notes.stepped = stepped
        notes.figures |= figures or {}
        notes.metrics |= {**metrics, "loss": loss}
        return self._save_between()

    def measured(self, **metrics: Any) -> None:
        """Record metrics measured after the step, such as `dev_loss` at the end of an epoch.

        Inside a loop over epochs or batches it is enough to call this on one rank.
        """
        self._notes.metrics.update(metrics)
        self._measured |= metrics.keys()
        self._save_between()

    def not_finite(self, error: ArithmeticError) -> None:
        """Roll back from a step that was not taken because a loss or gradient was not finite.

        Raises the error again unless `spike.action` is rollback. `train_window` raises it on every
        rank.
        """
        step = self.state.step + 1
        if self._boxes is not None:
            self._boxes.keep(step, str(error), found_at=step)
        spike = None
        if self._watch.config.rolls_back:
            spike = self._watch.judge(step, math.nan)
        if spike is None:
            raise error
        # The step was not finite, and so it has no loss.
        facts = asdict(spike) | {"reason": str(error), "loss": None}
        self._journal.write("spike", **facts)
        self._roll_back(spike)

    def close(self) -> None:
        """Save the final state, wait for the save and release the folder."""
        if self._open:
            self._close(self.ended_by or "closed")

    def _close(self, reason: str) -> None:
        # Batches that no step has taken are those of a window that ends here.
        if isinstance(self.data, DataPosition):
            self.data.stepped()
        try:
            self._save()
            if self.state.step:
                self.policy.save_now(self.state.step, self.state)
            if self._ranks.first:
                if reason in [number.name for number in STOP_SIGNALS]:
                    logger.warning("%s", self._describe_stop(reason))
                elif self.resumed and self.steps == self.resumed.saved.step:
                    logger.warning(
                        "%s: resumed at step %d, and trained no further step",
                        self.store.root,
                        self.steps,
                    )
                config = self.policy.config
                if config.best_k and self._measured and not self._chooses:
                    logger.warning(
                        "no best-K was kept: best_k_metric is %s, and the loop measured %s",
                        config.best_k_metric,
                        ", ".join(sorted(self._measured)),
                    )
            self._journal.ended(reason)
        finally:
            self._release()

    def _describe_stop(self, reason: str) -> str:
        """Describe the state that a signal leaves behind, and how to go on."""
        newest = self.store.latest()
        if newest is None:
            return f"{reason}: nothing was saved yet"
        # A loop over a stream of its own ends the process itself, and prints how to continue.
        again = "; start again to go on from there" if self._has_loader else ""
        return (
            f"{reason} after step {self.state.step}: saved at step {newest.step}, in "
            f"{newest.location}{again}"
        )

    def _load(self, what: str | int) -> Resumed | None:
        """Load a saved state into the training, and its position into the data."""
        resumed = self.policy.resume(self.state, what)
        self.data.position = self.state.position
        return resumed

    def _save_between(self) -> bool:
        return True if self._iterating or self._in_epoch else self._save()

    def _save(self) -> bool:
        """Save what is due; return False if the run was rolled back instead.

        Without a stream a signal ends the process here.
        """
        self.state.position = self.data.position
        notes = self._notes
        self._notes = StepNotes()
        name = self.policy.config.best_k_metric
        measured_here = notes.metrics.get(name) is not None
        # A signal waits for the end of an accumulation window, because gradients are not saved.
        asked = self._stop.number if getattr(self.data, "taken", None) == 0 else 0
        stop, noted, measured_anywhere = self._ranks.highest(
            [asked, notes.is_step or bool(notes.metrics), measured_here]
        )

        self._chooses |= bool(measured_anywhere)
        stands = True
        if noted:
            if measured_anywhere:
                # Evaluation often runs on rank 0 alone, so every rank needs its result.
                own = number_of(notes.metrics[name]) if measured_here else None
                notes.metrics[name] = self._ranks.first_found(lambda: own)
            stands = self._save_noted(notes, stop)

        if stop:
            self._stop.number = 0  # `_close` calls this method once more
            self._close(signal.Signals(stop).name)
            sys.exit(128 + stop)
        return stands

    def _save_noted(self, notes: StepNotes, stop: int) -> bool:
        """Write the journal, check the loss for a spike, and only then save."""
        self._journal.after_step(notes)
        loss = notes.metrics.get("loss")
        spike = None
        boxes = self._boxes
        if boxes is not None and notes.is_step and loss is not None:
            boxes.stepped(number_of(loss))
        if notes.is_step and notes.stepped:
            spike = self._watch.judge(self.state.step, loss)
        if spike is not None:
            self._journal.write("spike", **asdict(spike), reason=spike.words)
            if boxes is not None:
                boxes.keep(spike.first, spike.words, found_at=spike.step)
            if self._watch.config.rolls_back:
                self._roll_back(spike, stop=stop)
                return False

        self.policy.after_step(self.state.step, self.state, notes.metrics, is_step=notes.is_step)
        self._journal.begin_step()
        if boxes is not None:
            boxes.begin()
        return True

    def _roll_back(self, spike: Spike, *, stop: int = 0) -> None:
        """Load a state from before the spike, without whose samples the run goes on."""
        epoch = getattr(self.data, "epoch", 0)
        back = self._watch.go_back(spike, self.state, self._load)
        write = self._journal.write
        write("rollback", step=back.back_to, from_step=spike.step, reason=spike.words)
        reason = (
            f"positions {back.start} to {back.stop - 1} of the data, around the spike of step "
            f"{spike.step}"
        )
        write("skip", step=back.back_to, reason=reason, start=back.start, stop=back.stop)
        self._journal.begin_step()
        if self._has_loader:
            if self._ranks.first:
                self._warn_of_restart(epoch)
            self._journal.ended("spike")
            self._release()
            sys.exit(128 + stop if stop else RESTART_EXIT_STATUS)

    def _warn_of_restart(self, epoch: int) -> None:
        logger.warning("start again to go on")
        has_generator = any(name.startswith(DATA_PREFIX) for name in self.state.generators)
        if getattr(self.data, "epoch", 0) < epoch and not has_generator:
            logger.warning(
                "epoch %d will be shuffled again, in an order that depends on the model's random "
                "draws before it: give the loader a generator of its own, "
                "DataLoader(..., generator=torch.Generator())",
                epoch,
            )

    def _require_loader(self, call: str) -> DataPosition:
        if not isinstance(self.data, DataPosition):
            raise ValueError(
                f"{call} is for a DataLoader, and this run has a stream: iterate over the stream "
                "inside `while run.continues(until=...)`"
            )
        return self.data

    def _release(self, *raised: Any) -> None:
        self._open = False
        # First, and also where it fails the others follow.
        self.resources.callback(self._journal.close)
        self.resources.__exit__(*(raised or (None, None, None)))


# The name in a user's loop: `run = saving(...)`.
saving = AttachedRun
