"""Run of a training from its configuration: folder, saved state, resume and hooks.

    trained = train(load_config("config.yaml", ["steps=1000"]))

    with open_run(config) as run:                     # raises the errors of wrong input
        trained = train_run(run, watch=[show_progress])

Proof: `python -m pytest tests/test_training.py`.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from .config import Config
from .distribute import start_ranks
from .journal_hook import write_journal
from .loop import RunReport, StepReport, run_training_steps, save_checkpoint, stop_on_signals
from .parts import Parts, build_parts
from .primitives.grad_accum import GradientAccumulation, NonFiniteWindow
from .run_folder import new_run, note_resumed, run_to_resume
from .runs.background import BackgroundSaver
from .runs.names import Saved
from .runs.policy import SavingPolicy
from .runs.recoveries import Recoveries
from .runs.resume import Resumed
from .runs.spike import SpikeWatchdog
from .runs.state import TrainingState
from .runs.store import Store
from .spike_watch import SpikeWatch


@dataclass(frozen=True)
class Run:
    """An open run that continues from `state.step`, in its folder.

    `resumed` names the loaded checkpoint and the damaged ones that were skipped.
    """

    folder: Path
    parts: Parts
    state: TrainingState
    policy: SavingPolicy
    watchdog: SpikeWatchdog
    recoveries: Recoveries
    resumed: Resumed | None

    @property
    def first_step(self) -> int:
        return self.state.step

    def load(self, what: str) -> Resumed | None:
        """Load a saved state of this run into model, optimizer and data stream."""
        return _load(self.policy, self.state, self.parts, what)


@dataclass(frozen=True)
class Trained:
    """How a run ended, its folder, and the newest state in it."""

    report: RunReport
    folder: Path
    saved: Saved | None


Hook = Callable[[StepReport], Any]
Watch = Callable[[Run], contextlib.AbstractContextManager[Hook]]


def train(config: Config, *, resume: str | None = None, watch: Sequence[Watch] = ()) -> Trained:
    """Train on this rank, from a new run or a resumed one."""
    with open_run(config, resume=resume) as run:
        return train_run(run, watch=watch)


@contextlib.contextmanager
def open_run(config: Config, *, resume: str | None = None) -> Iterator[Run]:
    """Join the ranks and build a new run, or resume one.

    `resume` is `latest`, the name of a run, or a saved state.
    """
    with start_ranks(parallel=config.parallel, device=config.device, ranks=config.ranks) as ranks:
        parts = build_parts(config, ranks)
        watchdog = SpikeWatchdog(config.spike)
        state = TrainingState(
            parts.model,
            parts.optimizer,
            scaler=parts.scaler,
            config=asdict(config),
            extra={"spike": watchdog},
        )
        _seed(config.seed + 1 + ranks.rank)  # dropout draws differ from rank to rank
        folder, what = (None, None) if resume is None else run_to_resume(config, resume)
        if folder is None:
            folder = ranks.agree(new_run(config) if ranks.first else None)
        with contextlib.ExitStack() as opened:
            store = opened.enter_context(Store(folder))
            saver = opened.enter_context(BackgroundSaver(store))
            policy = opened.enter_context(SavingPolicy(store, config.checkpoint, saver=saver))
            resumed = None if what is None else _load(policy, state, parts, what)
            if resumed is not None and ranks.first:
                note_resumed(folder, config, step=state.step)
            recoveries = Recoveries(store.files)
            for recovery in recoveries.done:
                parts.stream.skip(recovery.start, recovery.stop)
            yield Run(folder, parts, state, policy, watchdog, recoveries, resumed)


def train_run(run: Run, *, watch: Sequence[Watch] = ()) -> Trained:
    """Train an open run to its end.

    Each context of `watch` is opened on the first rank when the run begins; its hook is called
    after every step.
    """
    parts = run.parts
    config = parts.config
    state = run.state

    def keep(report: StepReport) -> None:
        state.step = report.step
        state.position = parts.stream.position
        measured_dev = {} if report.dev_loss is None else {"dev_loss": report.dev_loss}
        metrics = {"loss": report.loss} | measured_dev
        if spikes.found is None:
            for saved in run.policy.after_step(report.step, state, metrics):
                journal.saved(saved)

    def save_last(step: int) -> None:
        if spikes.found is None:
            for saved in save_checkpoint(run.policy, state):
                journal.saved(saved)

    def train_on() -> RunReport | None:
        """Train until the end or a spike; None if a loss or gradient was not finite."""
        try:
            return run_training_steps(
                parts.model,
                parts.optimizer,
                parts.stream,
                parts.loss,
                steps=config.steps,
                first_step=state.step,
                accumulation=GradientAccumulation(parts.stream.microbatches_per_window),
                count=parts.case.workload.count,
                clip_norm=config.clip_norm,
                schedule=spikes.factor,
                scaler=parts.scaler,
                evaluate=parts.dev_loss if measured else None,
                evaluate_every=config.evaluate.every if measured else None,
                save=save_last,
                after_step=[journal, *hooks, spikes, keep],
                stop=stop,
            )
        except NonFiniteWindow as error:
            spikes.not_finite(error)
            return None

    measured = parts.dev is not None and config.evaluate.every is not None
    watched = _watching(watch if parts.ranks.first else (), run)
    with write_journal(run) as journal, watched as hooks, stop_on_signals() as stop:
        spikes = SpikeWatch(run, journal, stop)
        while (report := train_on()) is None or spikes.found is not None:
            spikes.recover()
        journal.ended(report.ended_by)
    return Trained(report, run.folder, run.policy.store.latest())


@contextlib.contextmanager
def _watching(watch: Sequence[Watch], run: Run) -> Iterator[list[Hook]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(each(run)) for each in watch]


def _load(policy: SavingPolicy, state: TrainingState, parts: Parts, what: str) -> Resumed | None:
    """Load a saved state, but keep the optimizer settings of the configuration."""
    settings = []
    for group in _groups(parts):
        settings.append({key: value for key, value in group.items() if key != "params"})
    resumed = policy.resume(state, what)
    for group, configured in zip(_groups(parts), settings, strict=True):
        group.update(configured)
    parts.stream.position = state.position
    return resumed


def _groups(parts: Parts) -> list[dict[str, Any]]:
    return parts.optimizer.param_groups


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
