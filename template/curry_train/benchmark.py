"""Time your own training steps: one accumulated step, or several alternatives compared.

    found = compare_steps({"ours": step, "theirs": other_step}, rounds=20, warmup=5)
    print(found["theirs"])

`curry-train bench` does this for a model and the levers of this package. Loading data is
not timed: pass batches that are already on the device.
Proof: `python -m pytest tests/trainer/test_benchmark.py`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .core.measure import Loss
from .core.timing import (
    NO_DIFFERENCE_VERDICT,
    TOO_FEW_VERDICT,
    Clock,
    Ratio,
    Spread,
    paired_ratio,
    spread_of,
    time_in_turns,
)
from .primitives.grad_accum import GradientAccumulation, WindowResult, train_window


@dataclass(frozen=True)
class AccumulatedStep:
    """One optimizer step over several microbatches, and its time until the device was done."""

    result: WindowResult
    num_microbatches: int
    seconds: float


@dataclass(frozen=True)
class TimedStep:
    """Times of one alternative.

    `ratio` compares with the first alternative's steps of the same rounds; it is None for the first
    alternative itself.
    """

    name: str
    seconds: tuple[float, ...]
    step: Spread
    ratio: Ratio | None

    def __str__(self) -> str:
        tenths = f"{1000 * self.step.lower:.3g}, {1000 * self.step.upper:.3g}"
        times = f"{self.name}: {1000 * self.step.median:.3g} ms a step (10% and 90%: {tenths})"
        ratio = self.ratio
        if ratio is None:
            return times
        verdict = ratio.verdict
        if verdict == TOO_FEW_VERDICT:
            return f"{times}, {ratio.median:.3g} of the first, {verdict}"

        bounds = f"{ratio.lower:.3g} to {ratio.upper:.3g}"
        if verdict != NO_DIFFERENCE_VERDICT:
            verdict = f"{verdict} than the first"
        return f"{times}, {ratio.median:.3g} of the first ({bounds}): {verdict}"


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
    """Time one window: all microbatches, or the first `accumulation.steps` of them."""
    microbatches = list(microbatches)
    accumulation = accumulation or GradientAccumulation(max(1, len(microbatches)))
    wait_for_device()
    start = time.perf_counter()
    window = next(accumulation.windows(microbatches, count=count))
    result = train_window(model, window, loss, optimizer, clip_norm=clip_norm)
    wait_for_device()  # train_window waits for its loss only; the optimizer step runs after that
    return AccumulatedStep(result, len(window), time.perf_counter() - start)


def compare_steps(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    warmup: int = 5,
    clock: Clock = time.perf_counter,
    wait: Callable[[], object] | None = None,
) -> dict[str, TimedStep]:
    """Time the steps in turns and compare each with the first.

    Each step really runs `rounds + warmup` times, so a step that trains changes its model. `wait`
    must return once the device is done; by default CUDA is synchronized where it was used.
    """
    waited = wait_for_device if wait is None else wait
    seconds = time_in_turns(
        list(steps.values()), rounds=rounds, warmup=warmup, clock=clock, wait=waited
    )
    results: dict[str, TimedStep] = {}
    for index, (name, taken) in enumerate(zip(steps, seconds, strict=True)):
        ratio = paired_ratio(taken, seconds[0]) if index else None
        results[name] = TimedStep(name, tuple(taken), spread_of(taken), ratio)
    return results


def wait_for_device() -> None:
    """Wait for all work queued on the current GPU, where this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
