"""The training loop: where loss, scaling, sync, clip, step, schedule, evaluation, saving and stopping meet.

    with stop_on_signals() as stop:
        report = run_training_steps(
            model, optimizer, microbatches, loss, steps=1000, accumulation=GradientAccumulation(4), count=count,
            schedule=factor, clip_norm=1.0, save=save, save_every=100, after_step=[show], stop=stop,
        )

What happens inside a step is `train_window`'s; this is what happens between steps, the same on every rank. Proof:
`python -m pytest tests/test_loop.py`.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .primitives.grad_accum import GradientAccumulation, NonFiniteWindow, train_window
from .runs.names import Saved
from .runs.policy import SavingPolicy
from .runs.state import TrainingState

MOST_SKIPPED = 25  # a loss scale that was halved so often is not what overflows
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class StepReport:
    """What a hook is told after a step; `step` counts from 1, figures are the same on every rank but `seconds`."""

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
    """How a run ended: `ended_by` is "steps", "data", or the name of a signal. `last` is None if no step was run."""

    step: int
    ended_by: str
    last: StepReport | None

    @property
    def finished(self) -> bool:
        return self.ended_by == "steps"


class Stop:
    """Asks the loop to end after the step that is running."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """SIGTERM and SIGINT end the run after the step; a second SIGINT ends it at once."""
    stop = Stop()

    def handle(number: int, frame: Any) -> None:
        if stop.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.ask(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
) -> RunReport:
    """Train until `steps` steps are done, `first_step` of them before; `microbatches` begin with the next one.

    `loss` is a sum over the terms that `count` counts (without it, a mean). `schedule` gives the factor on each group's
    learning rate for a step, from 0. `evaluate` gives the dev loss. `save` is called with the number of steps done,
    every `save_every` steps and at the end, however it comes, if steps were done since. `NonFiniteWindow` leaves the
    weights as they were before the step, on every rank.
    """
    _check(steps, first_step, {"evaluate": (evaluate, evaluate_every), "save": (save, save_every)})
    accumulation, stop = accumulation or GradientAccumulation(), stop or Stop()
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    done, saved, skipped, report = first_step, first_step, 0, None
    windows = accumulation.windows(microbatches, count=count) if done < steps else iter(())
    ended_by, began = "steps", time.perf_counter()
    while done < steps:
        window = next(windows, None)
        if window is None:
            ended_by = "data"
            break
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1.0 if schedule is None else schedule(done))
        try:
            result = train_window(
                model, window, loss, optimizer, clip_norm=clip_norm, scaler=scaler
            )
        except NonFiniteWindow as error:
            raise NonFiniteWindow(f"step {done + 1}: {error}") from error
        skipped = 0 if result.stepped else skipped + 1
        if scaler is not None and skipped == MOST_SKIPPED:
            raise NonFiniteWindow(
                f"step {done + 1}: {skipped} steps in a row were skipped because a gradient was not finite; the loss "
                f"scale is now {scaler.get_scale():g} and no longer the cause. Lower the learning rate, or use bfloat16"
            )
        done += 1
        now = time.perf_counter()
        rate = optimizer.param_groups[0]["lr"]
        report = StepReport(
            done,
            steps,
            result.loss,
            result.grad_norm,
            result.num_terms,
            rate,
            now - began,
            stepped=result.stepped,
        )
        began = now
        if evaluate is not None and _due(done, evaluate_every, steps):
            report = replace(report, dev_loss=evaluate())
        for hook in after_step:
            hook(report)
        if save is not None and _due(done, save_every, steps):
            save(done)
            saved = done
        began = time.perf_counter()
        if reason := _agreed(stop.reason):
            ended_by = reason if done < steps else "steps"
            break
    if save is not None and saved < done:
        save(done)
    return RunReport(done, ended_by, report)


def save_checkpoint(policy: SavingPolicy, state: TrainingState) -> list[Saved]:
    """Save the whole state at its step, on all ranks together, whatever the cadence; nothing where that is done."""
    return policy.save_now(state.step, state)


def _due(done: int, every: int | None, steps: int) -> bool:
    return every is not None and (done % every == 0 or done == steps)


def _agreed(reason: str | None) -> str | None:
    """Any rank's reason to stop, known to all of them."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return reason
    known = [None, *(number.name for number in SIGNALS), "asked"]
    place = known.index(reason if reason in known else "asked")
    told = torch.tensor(place, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return known[int(told)]


def _check(steps: int, first_step: int, pairs: dict[str, tuple[Any, int | None]]) -> None:
    if steps < 1 or first_step < 0:
        raise ValueError(
            f"steps must be at least 1 and first_step at least 0, got {steps} and {first_step}"
        )
    for name, (function, every) in pairs.items():
        if every is not None and (function is None or every < 1):
            wanted = "at least 1" if function is not None else f"None without {name}="
            raise ValueError(f"{name}_every must be {wanted}, got {every}")
