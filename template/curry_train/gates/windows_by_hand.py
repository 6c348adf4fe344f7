"""Train windows by hand, as the reference, and observe the optimizer's steps.

    measured, required, hint = compare_windows(case, sizes=[1, 4, 2, 3], hint="...")

A window is compared with its large batch by the gradients at each step of the optimizer. The
tolerance follows from how much a loop by hand differs where it sums over microbatches.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_grad_accum.py`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..core.measure import Loss
from ..core.parity import GRADIENT_TOLERANCES, Parity, StepRecord, check_comparable, compare, record
from ..primitives.grad_accum import GradientAccumulation, Window, train_window
from ..workloads.workload import Case, batch_size
from .implementation import takes
from .same_training import step_of
from .verdict import NotApplicable, Outcome

# If the batch summed by hand over its microbatches differs by more than this, the tolerance is so
# many times that difference.
DIVIDED_BATCH_FACTOR = 3
# Rounding is smaller by more than this in float64; the coupling of samples is not.
ROUNDING_FACTOR = 4
# Where a model does not run in float64, a difference above this is no rounding.
COUPLED_DIFFERENCE = 1e-3
MOST_LEARNING_RATE = 0.1
# Of the first window's gradient norm, so that every model is clipped.
CLIPPED_SHARE = 0.5

# A `train_window`: ours, the user's, or one by hand.
Train = Callable[..., Any]


@dataclass(frozen=True)
class Observed:
    """The optimizer's steps in a training of windows."""

    # These records hold the gradients at each step, and no loss.
    steps: Sequence[StepRecord]

    # None without a scheduler.
    num_schedule_steps: int | None

    def counts(self) -> str:
        counted = f"optimizer steps: {len(self.steps)}"
        if self.num_schedule_steps is not None:
            counted += f", schedule steps: {self.num_schedule_steps}"
        return counted

    def compare(self, reference: "Observed", *, tolerance: float = 0.0) -> Parity:
        """Compare gradients step by step, and return the worst.

        Buffers are left out: those that count calls or average batches differ by design.
        """
        gradients = itertools.chain((step.gradients for step in self.steps), itertools.repeat({}))
        found = [
            compare(step, replace(step, gradients=theirs), tolerance=tolerance)
            for step, theirs in zip(reference.steps, gradients, strict=False)
        ]
        return max(found, key=lambda parity: parity.worst)


def observe(
    module: nn.Module,
    windows: Sequence[Window[Any]],
    train: Train,
    loss: Loss,
    *,
    rate: float = 0.0,
    clip_norm: float | None = None,
    is_scheduled: bool = False,
    scaler: torch.amp.GradScaler | None = None,
) -> Observed:
    """Train a module on windows, and record the gradients before each step of the optimizer."""
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if is_scheduled else None
    given = {"clip_norm": clip_norm, "scheduler": scheduler, "scaler": scaler}
    options = {name: value for name, value in given.items() if value is not None}
    steps: list[StepRecord] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(record(module, torch.zeros(()))))
    for window in windows:
        train(module, window, loss, optimizer, **options)
    return Observed(steps, None if scheduler is None else scheduler.last_epoch)


def window_by_hand(case: Case, microbatches: Sequence[Any]) -> Window[Any]:
    """Make a window of one process, also where ranks are running."""
    num_terms = sum(map(case.workload.count, microbatches))
    return Window(tuple(microbatches), loss_divisor=float(num_terms), num_terms=num_terms)


def train_by_hand(
    model: nn.Module,
    window: Window[Any],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    clip_norm: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    optimizer.zero_grad()
    for microbatch in window.microbatches:
        is_last = microbatch is window.microbatches[-1]
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        (loss(model, microbatch) / window.loss_divisor).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def compare_windows(
    case: Case,
    *,
    train_window: Train = train_window,
    sizes: Sequence[int] = (),
    num_steps: int | None = None,
    is_masked: bool = False,
    with_options: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    hint: str,
) -> Outcome:
    """Compare windows of `num_steps` microbatches with large batches that are trained by hand.

    The sizes are those of the microbatches, by default of four, of which all are one window without
    `num_steps`. `with_options` clips and schedules too, where the implementation takes that.
    """
    clips = with_options and takes(train_window, "clip_norm")
    is_scheduled = with_options and takes(train_window, "scheduler")
    if with_options and scaler is None and not (clips or is_scheduled):
        raise NotApplicable("the implementation takes neither clip_norm nor scheduler")
    sizes = sizes or [case.batch_size] * 4
    num_steps = num_steps or len(sizes)
    batch = case.batch(sum(sizes))
    if is_masked and case.workload.mask:
        batch = case.workload.mask(batch)
    microbatches = case.split(batch, sizes)
    module = case.build().eval()
    by_hand = [microbatches[start : start + num_steps] for start in range(0, len(sizes), num_steps)]
    gradients = _by_hand(case, by_hand[:1]).steps[0].gradients.values()
    norm = math.hypot(*(one.norm().item() for one in gradients if one is not None))
    clip_norm = CLIPPED_SHARE * norm if clips else None
    settings: dict[str, Any] = {
        "rate": _learning_rate(module, clip_norm or norm),
        "clip_norm": clip_norm,
        "is_scheduled": is_scheduled,
    }
    reference, tolerance = reference_by_hand(case, by_hand, batch, **settings)
    windows = [*GradientAccumulation(num_steps).windows(microbatches, count=case.workload.count)]
    observed = observe(module, windows, train_window, case.workload.loss, scaler=scaler, **settings)
    parity = observed.compare(reference, tolerance=tolerance)
    measured = f"{parity.describe()}; {observed.counts()}"
    required = f"gradients within {tolerance:.1e} of the large batch; {reference.counts()}"
    holds = parity.holds and observed.counts() == reference.counts()
    return measured, required, "" if holds else hint


def _learning_rate(module: nn.Module, gradient_norm: float) -> float:
    """Return a learning rate at which the first step changes the weights by a tenth at most."""
    weights = math.hypot(*(one.detach().norm().item() for one in module.parameters()))
    return MOST_LEARNING_RATE * min(1.0, weights / (gradient_norm or 1.0))


def reference_by_hand(
    case: Case, windows: Sequence[Sequence[Any]], batch: Any, **settings: Any
) -> tuple[Observed, float]:
    """Train the batch by hand, a window at a time; return what was observed and the tolerance.

    The tolerance is that of the dtype, or more for a model whose gradients differ by more than that
    when a loop by hand sums each window over its microbatches.
    """

    def whole_and_difference(case: Case) -> tuple[Observed, float]:
        """Train on whole windows and on microbatches; return the first and the difference."""
        sizes = [sum(map(batch_size, window)) for window in windows]
        wholes = [[window] for window in case.split(case.place(batch), sizes)]
        whole = _by_hand(case, wholes, **settings)
        placed = [list(map(case.place, window)) for window in windows]
        return whole, _by_hand(case, placed, **settings).compare(whole).worst

    def is_rounding() -> bool:
        """Return whether the difference is much smaller in float64."""
        try:
            _, remaining = whole_and_difference(replace(case, dtype=torch.float64))
        except (RuntimeError, TypeError):
            # The model or the device computes in other dtypes alone.
            scale = tolerance / GRADIENT_TOLERANCES[torch.float32]
            return difference <= COUPLED_DIFFERENCE * min(scale, 100)
        return ROUNDING_FACTOR * remaining < difference

    check_comparable(step_of(case, case.build().eval(), batch))
    whole, difference = whole_and_difference(case)
    tolerance = GRADIENT_TOLERANCES[case.dtype]
    if difference > tolerance and not is_rounding():
        raise NotApplicable(
            f"a batch's gradient differs by {difference:.1e} from the sum over its parts, and not "
            "by rounding: the loss couples samples, or is not a sum, which a Workload has to "
            "return, or the model draws random numbers in eval mode (draw them only if "
            "module.training is set), or keeps state between calls"
        )
    return whole, max(tolerance, DIVIDED_BATCH_FACTOR * difference)


def _by_hand(case: Case, windows: Sequence[Sequence[Any]], **settings: Any) -> Observed:
    made = [window_by_hand(case, window) for window in windows]
    return observe(case.build().eval(), made, train_by_hand, case.workload.loss, **settings)
