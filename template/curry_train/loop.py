"""Training loop: steps, learning rate schedule, evaluation, saving and stopping.

    with saving(model, optimizer, runs="runs/mine", stream=stream, journal=True) as run:
        report = run_training_steps(
            model, optimizer, stream, loss, steps=1000, run=run,
            accumulation=GradientAccumulation(4), count=count,
            schedule=factor, clip_norm=1.0, evaluate=dev_loss, evaluate_every=100,
        )

Without `run` nothing is saved, unless `save` does it. `train_window` runs a single step; this
module does what happens between steps, the same on every rank.

Proof: `python -m pytest tests/trainer/test_loop.py tests/trainer/test_evaluation.py`.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .core.rerun import buffers_kept, generators_kept
from .primitives.grad_accum import GradientAccumulation, NonFiniteWindow, train_window
from .runs.attach import AttachedRun, Stop
from .runs.layout import SavedCheckpoint
from .runs.policy import SavingPolicy
from .runs.ranks import Ranks
from .runs.state import TrainingState

MOST_SKIPPED = 25  # after this many halvings the loss scale is not the cause of the overflow


@dataclass(frozen=True)
class StepReport:
    """Figures of one step, passed to the hooks; `step` counts from 1.

    All figures except `seconds` are the same on every rank.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float
    num_terms: int
    learning_rate: float
    seconds: float
    stepped: bool = True
    dev_loss: float | None = None


@dataclass(frozen=True)
class RunReport:
    """The end of a run.

    `ended_by` is "steps", "data", or the name of a signal; `last` is None if no step was run.
    """

    step: int
    ended_by: str
    last: StepReport | None

    @property
    def finished(self) -> bool:
        return self.ended_by == "steps"


def run_training_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    steps: int,
    first_step: int = 0,
    accumulation: GradientAccumulation | None = None,
    count: Callable[[Any], Any] | None = None,
    clip_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    evaluate: Callable[[], float] | None = None,
    evaluate_every: int | None = None,
    save: Callable[[int], Any] | None = None,
    save_every: int | None = None,
    after_step: Sequence[Callable[[StepReport], Any]] = (),
    stop: Stop | None = None,
    run: AttachedRun | None = None,
) -> RunReport:
    """Train until `steps` steps are done, counting `first_step` steps done before.

    `microbatches` begin with those of the next step. `loss` returns a sum over the terms that
    `count` counts (without `count`, a mean). `schedule` returns the factor on each group's learning
    rate for a step, counted from 0. `evaluate` returns the dev loss. `save` is called with the
    number of steps done, every `save_every` steps and, if steps were done since, when the loop
    ends for any reason but an error. `NonFiniteWindow` leaves the weights as they were before the
    step, on every rank. `stop` ends the loop after a step: `Stop(STOP_SIGNALS)` on a signal.

    `run` is what `saving(..., stream=microbatches)` returned: training continues from its step, it
    saves, writes the journal, rolls back from loss spikes, and ends the loop on a signal. `save`,
    `save_every`, `stop` and `first_step` are then its part.
    """
    _check(steps, first_step, {"evaluate": (evaluate, evaluate_every), "save": (save, save_every)})
    if run is not None and (save is not None or stop is not None or first_step):
        raise ValueError("run= saves, stops and has its step: leave out save, stop and first_step")
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])

    accumulation = accumulation or GradientAccumulation()
    windows = accumulation.windows(microbatches, count=count) if first_step < steps else iter(())
    options: dict[str, Any] = {"optimizer": optimizer, "clip_norm": clip_norm, "scaler": scaler}
    loop = _StepLoop(
        train=functools.partial(train_window, model, loss=loss, **options),
        optimizer=optimizer,
        steps=steps,
        schedule=schedule,
        scaler=scaler,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        save=save,
        save_every=save_every,
        after_step=after_step,
        stop=stop or Stop(),
    )
    if run is not None:
        return loop.continue_run(windows, run)
    return loop.run(windows, first_step=first_step)


@dataclass
class _StepLoop:
    """Settings of `run_training_steps`, and the number of steps skipped in a row."""

    train: Callable[..., Any]  # `train_window`, given a window
    optimizer: torch.optim.Optimizer
    steps: int
    schedule: Callable[[int], float] | None
    scaler: torch.amp.GradScaler | None
    evaluate: Callable[[], float] | None
    evaluate_every: int | None
    save: Callable[[int], Any] | None
    save_every: int | None
    after_step: Sequence[Callable[[StepReport], Any]]
    stop: Stop
    num_skipped: int = 0

    def continue_run(self, windows: Iterator[Any], run: AttachedRun) -> RunReport:
        """Train what is left of a run that `saving` made; after a rollback steps are done again."""
        report = None
        while run.continues(until=self.steps):
            began = time.perf_counter()
            window = next(windows, None)
            if window is None:
                run.ended_by = "data"
                break
            try:
                factor = run.learning_rate_factor()
                report = self._step(window, run.steps, began, factor=factor)
            except NonFiniteWindow as error:
                run.not_finite(error)
                continue

            metrics = {}
            if self.evaluate is not None and _due(report.step, self.evaluate_every, self.steps):
                report = replace(report, dev_loss=self.evaluate())
                metrics["dev_loss"] = report.dev_loss
            figures = {
                "grad_norm": report.grad_norm,
                "terms": report.num_terms,
                "learning_rate": report.learning_rate,
                "seconds": report.seconds,
            }
            run.step(loss=report.loss, stepped=report.stepped, figures=figures, **metrics)
            for hook in self.after_step:
                hook(report)
        return RunReport(run.steps, run.ended_by or "stopped", report)

    def run(self, windows: Iterator[Any], *, first_step: int) -> RunReport:
        """Train without `saving`: call `save` where it is due, and end where `stop` asks for it."""
        ranks = Ranks.on_the_host()
        done = first_step
        saved = first_step
        report = None
        ended_by = "steps"
        began = time.perf_counter()
        while done < self.steps:
            window = next(windows, None)
            if window is None:
                ended_by = "data"
                break

            report = self._step(window, done, began)
            done += 1
            if self.evaluate is not None and _due(done, self.evaluate_every, self.steps):
                report = replace(report, dev_loss=self.evaluate())
            for hook in self.after_step:
                hook(report)
            if self.save is not None and _due(done, self.save_every, self.steps):
                self.save(done)
                saved = done

            began = time.perf_counter()
            if reason := self.stop.agreed(ranks):
                ended_by = reason if done < self.steps else "steps"
                break

        if self.save is not None and saved < done:
            self.save(done)
        return RunReport(done, ended_by, report)

    def _step(self, window: Any, done: int, began: float, *, factor: float = 1.0) -> StepReport:
        """Train one window with its learning rate; `done` steps were done before it."""
        if self.schedule is not None:
            factor *= self.schedule(done)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        try:
            result = self.train(window)
        except NonFiniteWindow as error:
            raise NonFiniteWindow(f"step {done + 1}: {error}") from error

        self.num_skipped = 0 if result.stepped else self.num_skipped + 1
        if self.scaler is not None and self.num_skipped == MOST_SKIPPED:
            raise NonFiniteWindow(
                f"step {done + 1}: {self.num_skipped} steps in a row were skipped because a "
                f"gradient was not finite; the loss scale is now {self.scaler.get_scale():g} and "
                "no longer the cause. Lower the learning rate, or use bfloat16"
            )
        return StepReport(
            step=done + 1,
            steps=self.steps,
            loss=result.loss,
            grad_norm=result.grad_norm,
            num_terms=result.num_terms,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            seconds=time.perf_counter() - began,
            stepped=result.stepped,
        )


def save_checkpoint(policy: SavingPolicy, state: TrainingState) -> list[SavedCheckpoint]:
    """Save the whole state at its step on all ranks, whatever the cadence, unless it is saved."""
    return policy.save_now(state.step, state)


def _due(done: int, every: int | None, steps: int) -> bool:
    return every is not None and (done % every == 0 or done == steps)


def _check(steps: int, first_step: int, pairs: dict[str, tuple[Any, int | None]]) -> None:
    if steps < 1 or first_step < 0:
        raise ValueError(
            f"steps must be at least 1 and first_step at least 0, got {steps} and {first_step}"
        )
    for name, (function, every) in pairs.items():
        if every is not None and (function is None or every < 1):
            wanted = "at least 1" if function is not None else f"None without {name}="
            raise ValueError(f"{name}_every must be {wanted}, got {every}")


# Mean loss over dev samples, the same samples for any number of ranks.


class DevSamples(Protocol):
    """Samples to evaluate on: a number of them, and batches of any of them."""

    def __len__(self) -> int: ...

    def batch(self, samples: Sequence[int]) -> Any: ...


def mean_loss(
    model: nn.Module,
    dataset: DevSamples,
    loss: Callable[[nn.Module, Any], Tensor],
    count: Callable[[Any], int],
    *,
    samples: int,
    microbatch: int,
    rank: int = 0,
    ranks: int = 1,
) -> float:
    """Return the mean loss over the first `samples` samples, in eval mode.

    The model and every random generator are left unchanged. A rank without samples left evaluates
    the last sample with no weight, because FSDP2 needs every rank in each forward.
    """
    samples = min(samples, len(dataset))
    sums = torch.zeros(2, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), generators_kept(), buffers_kept(model):
            for start in range(0, samples, microbatch * ranks):
                first = start + rank * microbatch
                own = range(first, min(samples, first + microbatch))
                batch = dataset.batch(own or [samples - 1])
                value = loss(model, batch)
                if own:
                    sums += torch.tensor([value.item(), count(batch)], dtype=torch.float64)
    finally:
        model.train(was_training)
    if ranks > 1:
        sums = sums.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(sums)
    total, terms = sums.tolist()
    return total / terms if terms else float("nan")
