"""Time training steps of your own: one accumulated step, or several ways to take a step held against each other.

    found = compare_steps({"ours": step, "theirs": other_step}, rounds=20, warmup=5)
    print(found["theirs"])

`python -m curry_train bench` does it for a model with every lever of this package. Loading data is not timed: hand the
batches in as they are on the device. Proof: `python -m pytest tests/test_benchmark.py`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .core.paired import NO_DIFFERENCE, TOO_FEW, Ratio, Spread, paired_ratio, spread_of
from .core.turns import Clock, time_in_turns
from .primitives.grad_accum import GradientAccumulation, WindowResult, train_window

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class AccumulatedStep:
    """One optimizer step over several microbatches, and the time it took, the device waited for."""

    result: WindowResult
    num_microbatches: int
    seconds: float

    @property
    def terms_per_second(self) -> float:
        return self.result.num_terms / self.seconds


@dataclass(frozen=True)
class TimedStep:
    """One of the ways that were compared. `ratio` is to the first one's steps of the same rounds, and None there."""

    name: str
    seconds: tuple[float, ...]
    step: Spread
    ratio: Ratio | None

    def __str__(self) -> str:
        times = ", ".join(f"{1000 * part:.3g}" for part in (self.step.lower, self.step.upper))
        said = f"{self.name}: {1000 * self.step.median:.3g} ms a step (tenths: {times})"
        if self.ratio is None:
            return said
        if self.ratio.verdict == TOO_FEW:
            return f"{said}, {self.ratio.median:.3g} of the first, {TOO_FEW}"
        bounds = f"{self.ratio.lower:.3g} to {self.ratio.upper:.3g}"
        verdict = (
            self.ratio.verdict
            if self.ratio.verdict == NO_DIFFERENCE
            else f"{self.ratio.verdict} than the first"
        )
        return f"{said}, {self.ratio.median:.3g} of the first ({bounds}): {verdict}"


def run_accumulated_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Iterable[Any],
    loss: Loss,
    *,
    accumulation: GradientAccumulation | None = None,
    count: Callable[[Any], Any] | None = None,
    clip_norm: float | None = None,
) -> AccumulatedStep:
    """Time one window: all the microbatches, or the first `accumulation.steps` of them."""
    microbatches = list(microbatches)
    accumulation = accumulation or GradientAccumulation(max(1, len(microbatches)))
    wait_for_device()
    start = time.perf_counter()
    window = next(accumulation.windows(microbatches, count=count))
    result = train_window(model, window, loss, optimizer, clip_norm=clip_norm)
    wait_for_device()  # the window waits for its loss, and the optimizer's step comes after that
    return AccumulatedStep(result, len(window), time.perf_counter() - start)


def compare_steps(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    warmup: int = 5,
    clock: Clock = time.perf_counter,
    wait: Callable[[], object] | None = None,
) -> dict[str, TimedStep]:
    """Take the steps in turns, and hold each against the first. Each runs `rounds + warmup` times for real: a step that
    trains, trains. `wait` returns once the device is done; CUDA is waited for where it was used."""
    if not steps:
        raise ValueError("there is no step to time: give at least one, by name")
    waited = wait_for_device if wait is None else wait
    seconds = time_in_turns(
        list(steps.values()), rounds=rounds, warmup=warmup, clock=clock, wait=waited
    )
    return {
        name: TimedStep(
            name, tuple(taken), spread_of(taken), paired_ratio(taken, seconds[0]) if index else None
        )
        for index, (name, taken) in enumerate(zip(steps, seconds, strict=True))
    }


def wait_for_device() -> None:
    """Until the current GPU has done all that it was given, where this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
