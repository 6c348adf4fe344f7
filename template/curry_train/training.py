"""A run from its configuration to its end: the folder, the state that is saved and resumed, and who watches.

    trained = train(load_config("config.yaml", ["steps=1000"]))

    with open_run(config) as run:                     # what the user got wrong is told here
        trained = train_run(run, watch=[write_metrics])

Proof: `python -m pytest tests/test_training.py`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .config import Config
from .distribute import start_ranks
from .loop import RunReport, StepReport, run_training_steps, save_checkpoint, stop_on_signals
from .parts import Parts, build_parts
from .primitives.grad_accum import GradientAccumulation
from .run_folder import SAVED, new_run, note_resumed, state_to_resume
from .saved_state import TrainingState, read_state


@dataclass(frozen=True)
class Run:
    """What is about to go on from `state.step`, in its folder."""

    folder: Path
    parts: Parts
    state: TrainingState

    @property
    def first_step(self) -> int:
        return self.state.step


@dataclass(frozen=True)
class Trained:
    """How a run ended, its folder, and the state that was saved last, if any was."""

    report: RunReport
    folder: Path
    saved: Path | None


Hook = Callable[[StepReport], Any]
Watch = Callable[[Run], contextlib.AbstractContextManager[Hook]]


def train(config: Config, *, resume: str | None = None, watch: Sequence[Watch] = ()) -> Trained:
    """Train as one of the ranks."""
    with open_run(config, resume=resume) as run:
        return train_run(run, watch=watch)


@contextlib.contextmanager
def open_run(config: Config, *, resume: str | None = None) -> Iterator[Run]:
    """Join the ranks and build a new run, or one that goes on: `resume` is `latest`, the name of a run, or a saved
    state."""
    with start_ranks(parallel=config.parallel, device=config.device, ranks=config.ranks) as ranks:
        parts = build_parts(config, ranks)
        state = TrainingState(parts.model, parts.optimizer, parts.scaler, parts.stream, config=asdict(config))
        torch.manual_seed(config.seed + 1 + ranks.rank)  # what dropout draws differs from rank to rank
        if resume is None:
            folder = ranks.agree(new_run(config) if ranks.first else None)
        else:
            saved = state_to_resume(config, resume)
            read_state(saved, state)
            folder = saved.parent.parent
            if ranks.first:
                note_resumed(folder, config, step=state.step)
        yield Run(folder, parts, state)


def train_run(run: Run, *, watch: Sequence[Watch] = ()) -> Trained:
    """Each of `watch` is opened on the first rank when the run begins, and told of every step."""
    parts, config, written = run.parts, run.parts.config, list[Path]()

    def save(step: int) -> None:
        run.state.step = step
        keep = config.checkpoint.retention.recovery_keep
        written.append(save_checkpoint(run.folder / SAVED, run.state, keep=keep))

    measured = parts.dev is not None and config.evaluate.every is not None
    with _watching(watch if parts.ranks.first else (), run) as hooks, stop_on_signals() as stop:
        report = run_training_steps(
            parts.model,
            parts.optimizer,
            parts.stream,
            parts.loss,
            steps=config.steps,
            first_step=run.state.step,
            accumulation=GradientAccumulation(parts.stream.microbatches_per_window),
            count=parts.case.workload.count,
            clip_norm=config.clip_norm,
            schedule=config.learning_rates(),
            scaler=parts.scaler,
            evaluate=parts.dev_loss if measured else None,
            evaluate_every=config.evaluate.every if measured else None,
            save=save,
            save_every=config.checkpoint.recovery_every,
            after_step=hooks,
            stop=stop,
        )
    return Trained(report, run.folder, written[-1] if written else None)


@contextlib.contextmanager
def _watching(watch: Sequence[Watch], run: Run) -> Iterator[list[Hook]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(each(run)) for each in watch]
