"""Gates of gradient accumulation: it gives the gradients of the large batch.

    measured, required, hint = compare_windows(case, sizes=[[1, 4, 2, 3]], hint="...")

A window is compared with its large batch by the gradients at each step of the optimizer. The
tolerance follows from how much a loop by hand differs where it sums over microbatches.

A large batch is compared in eval mode: dropout and BatchNorm depend on the microbatch, and would
differ for the right implementation too. Judged are the gradients and counts of the optimizer's and
schedule's steps, the weights, and the syncs between ranks.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_grad_accum.py`.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..core.generators import seeded
from ..core.measure import Loss
from ..core.parity import GRADIENT_TOLERANCES, Parity, StepRecord, check_comparable, compare, record
from ..primitives.grad_accum import GradientAccumulation, Window, train_window
from ..workloads.from_script import launcher_variables
from ..workloads.workload import Case
from .implementation import takes
from .same_training import step_of
from .two_ranks import Found, GradientSyncs, Measured, Wrapped, compare_on_ranks, measure_under_both
from .verdict import Gate, NotApplicable, Outcome

RANK_SIZES = [1, 4, 3]  # of the microbatches of one rank
LOSS_SCALE = 2.0**10  # under a scaler
# If the batch summed by hand over its microbatches differs by more than this, the tolerance is so
# many times that difference.
DIVIDED_BATCH_FACTOR = 3
# Rounding is smaller by more than this in float64; the coupling of samples is not.
ROUNDING_FACTOR = 4
# Where a model does not run in float64, a difference above this is no rounding.
COUPLED_DIFFERENCE = 1e-3
MOST_LEARNING_RATE = 0.1
# Gradients are clipped to this share of the first window's norm, so that every model is clipped.
CLIPPED_SHARE = 0.5

# A `train_window`: ours, the user's, or one by hand.
Train = Callable[..., Any]
# The sizes of the microbatches of each window.
Sizes = Sequence[Sequence[int]]


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
    windows: Iterable[Window[Any]],
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


def cut_windows(case: Case, batch: Any, sizes: Sizes) -> Iterator[Window[Any]]:
    """Cut a batch into windows of one process, also where ranks are running."""
    parts = iter(case.split(case.place(batch), [*itertools.chain(*sizes)]))
    for window in sizes:
        microbatches = tuple(itertools.islice(parts, len(window)))
        num_terms = sum(map(case.workload.count, microbatches))
        yield Window(microbatches, loss_divisor=float(num_terms), num_terms=num_terms)


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
    sizes: Sizes = (),
    with_options: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    hint: str,
) -> Outcome:
    """Compare windows of microbatches with large batches that are trained by hand.

    Without `sizes` it is one window of four with equal weights; with them the loss is masked, where
    it can be. `with_options` clips and schedules too, where the implementation takes that.
    """
    clips = with_options and takes(train_window, "clip_norm")
    is_scheduled = with_options and takes(train_window, "scheduler")
    if with_options and scaler is None and not (clips or is_scheduled):
        raise NotApplicable("the implementation takes neither clip_norm nor scheduler")
    mask = sizes and case.workload.mask
    sizes = sizes or [[case.batch_size] * 4]
    batch = case.batch(sum(map(sum, sizes)))
    if mask:
        batch = mask(batch)
    microbatches = case.split(batch, [*itertools.chain(*sizes)])
    first = _observe_by_hand(case, batch, sizes).steps[0]
    norm = first.gradient_norm * (CLIPPED_SHARE if clips else 1.0)
    settings: dict[str, Any] = {
        # The first step changes the weights by a tenth at most.
        "rate": MOST_LEARNING_RATE * min(1.0, first.parameter_norm / (norm or 1.0)),
        "clip_norm": norm if clips else None,
        "is_scheduled": is_scheduled,
    }
    reference, tolerance = train_reference(case, batch, sizes, **settings)
    accumulation = GradientAccumulation(len(sizes[0]))
    windows = accumulation.windows(microbatches, count=case.workload.count)
    module = case.build().eval()
    observed = observe(module, windows, train_window, case.workload.loss, scaler=scaler, **settings)
    parity = observed.compare(reference, tolerance=tolerance)
    measured = f"{parity.describe()}; {observed.counts()}"
    required = f"gradients within {tolerance:.1e} of the large batch; {reference.counts()}"
    holds = parity.holds and observed.counts() == reference.counts()
    return measured, required, "" if holds else hint


def train_reference(
    case: Case, batch: Any, sizes: Sizes, **settings: Any
) -> tuple[Observed, float]:
    """Train the batch by hand, a window at a time; return what was observed and the tolerance.

    The tolerance is that of the dtype, or more for a model whose gradients differ by more than that
    when a loop by hand sums each window over its microbatches.
    """

    def whole_and_difference(case: Case) -> tuple[Observed, float]:
        """Train on whole windows and on microbatches; return the first and the difference."""
        whole = _observe_by_hand(case, batch, [[sum(window)] for window in sizes], **settings)
        return whole, _observe_by_hand(case, batch, sizes, **settings).compare(whole).worst

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


def _observe_by_hand(case: Case, batch: Any, sizes: Sizes, **settings: Any) -> Observed:
    windows = cut_windows(case, batch, sizes)
    return observe(case.build().eval(), windows, train_by_hand, case.workload.loss, **settings)


# Other gates: a gradient scaler, and random numbers.


def scaled_window(case: Case, *, train_window: Train = train_window) -> Outcome:
    """Compare a window under a gradient scaler, clipped, with one trained by hand without it.

    A gradient that overflows must skip the step and the schedule.
    """
    device = case.device.type
    if not takes(train_window, "scaler"):
        raise NotApplicable("the implementation takes no gradient scaler")
    trained = {one.dtype for one in case.build().parameters() if one.requires_grad}
    refused = {torch.float16, torch.complex64, torch.complex128}
    if device == "cuda":
        refused.add(torch.bfloat16)
    for dtype in trained & refused:
        raise NotApplicable(f"torch's scaler takes no gradients in {dtype}")
    measured, required, hint = compare_windows(
        case,
        train_window=train_window,
        sizes=[[2] * 4],
        with_options=True,
        scaler=torch.amp.GradScaler(device, init_scale=LOSS_SCALE),
        hint="unscale once per window, after the last backward and before clipping",
    )

    def overflowing(model: nn.Module, microbatch: Any) -> Tensor:
        value = case.workload.loss(model, microbatch)
        value.register_hook(lambda gradient: gradient * math.inf)
        return value

    overflowed = observe(
        case.build().eval(),
        cut_windows(case, case.batch(8), [[2] * 4]),
        train_window,
        overflowing,
        is_scheduled=takes(train_window, "scheduler"),
        scaler=torch.amp.GradScaler(device),
    )
    measured += f"; overflow: {overflowed.counts()}"
    if not hint and (overflowed.steps or overflowed.num_schedule_steps):
        hint = "step through the scaler, and the schedule only if the scaler stepped"
    return measured, f"{required}; overflow: no steps", hint


def random_numbers(case: Case, *, train_window: Train = train_window) -> Outcome:
    """Compare a window in training mode with a loop by hand on the same random numbers.

    A number drawn next to each loss shows whether each microbatch draws its own.
    """
    sizes = [case.batch_size] * 3
    windows = [*cut_windows(case, case.batch(sum(sizes)), [sizes])]

    def training(train: Train) -> tuple[Observed, list[float]]:
        draws: list[float] = []

        def loss(model: nn.Module, microbatch: Any) -> Tensor:
            draws.append(torch.rand(()).item())
            return case.workload.loss(model, microbatch)

        with seeded(case.seed):
            return observe(case.build(), windows, train, loss), draws

    (reference, expected), (again, _) = training(train_by_hand), training(train_by_hand)
    tolerance = GRADIENT_TOLERANCES[case.dtype]
    required = f"as by hand within {tolerance:.0e}, random numbers equal"
    if not again.compare(reference).bit_equal:
        raise NotApplicable("a loop by hand in training mode does not repeat itself bit for bit")

    observed, draws = training(train_window)
    parity = observed.compare(reference, tolerance=tolerance)
    num_own = len(set(draws))
    measured = f"{parity.describe()}; {num_own} of {len(sizes)} microbatches draw their own"
    hint = ""
    if draws != expected:
        hint = "draw on from microbatch to microbatch: do not seed inside the window"
    elif not parity.holds:
        hint = "run each microbatch once, in order, in the mode that the module has"
    return measured, required, hint


# Two ranks.


def two_ranks(case: Case, *, train_window: Train = train_window) -> Outcome:
    """Compare DDP and FSDP2 on two gloo ranks with the large batch, with one sync per window."""
    # Raises NotApplicable here and not in the other processes.
    train_reference(case, case.batch(2 * sum(RANK_SIZES)), [2 * RANK_SIZES])
    return compare_on_ranks(
        _compare_on_rank,
        case,
        required=f"{GRADIENT_TOLERANCES[case.dtype]:.0e} or {DIVIDED_BATCH_FACTOR} times that of a "
        "loop by hand; 1 sync a window",
        hint="divide by the terms of all ranks, over their number where DDP averages; use no_sync "
        "or set_requires_gradient_sync until the window's last microbatch",
        train=train_window,
    )


def _compare_on_rank(case: Case, train: Train) -> Found:
    """Train this rank's part of an uneven masked window, and compare it with the whole batch."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    batch = case.batch(sum(RANK_SIZES) * num_ranks)
    if case.workload.mask:
        batch = case.workload.mask(batch)
    sizes = RANK_SIZES * num_ranks
    microbatches = case.split(batch, sizes)[len(RANK_SIZES) * rank :][: len(RANK_SIZES)]
    reference, tolerance = train_reference(case, batch, [sizes])
    (window,) = GradientAccumulation(len(RANK_SIZES)).windows(
        microbatches, count=case.workload.count
    )

    def measure(wrapped: Wrapped, kind: str) -> Measured:
        model = wrapped()

        def measure_window(train: Train) -> tuple[float, int]:
            model.zero_grad()
            with GradientSyncs() as syncs:
                observed = observe(model, [window], train, case.workload.loss)
            return observed.compare(reference).worst, syncs.num_calls

        # DDP rebuilds its buckets after the first backward.
        measure_window(train_by_hand)
        error_by_hand, syncs_by_hand = measure_window(train_by_hand)
        # An implementation may read what torchrun sets.
        with patch.dict(os.environ, launcher_variables(rank, num_ranks)):
            error, num_syncs = measure_window(train)
        if error_by_hand > tolerance:
            return f"a loop by hand under {kind} differs by {error_by_hand:.1e}", None
        syncs = num_syncs / syncs_by_hand
        return f"{error:.1e}, syncs {syncs:g}", error <= tolerance and syncs == 1

    return measure_under_both(case, microbatches, measure)


GATES = (
    Gate(
        "grad-accum/equal",
        # Four equally weighted microbatches.
        partial(
            compare_windows,
            hint="divide each summed loss once, by the terms of the whole window, and step once",
        ),
    ),
    Gate(
        "grad-accum/uneven",
        # Microbatches of different sizes and, if the loss can be masked, numbers of tokens.
        partial(
            compare_windows,
            sizes=[[1, 4, 2, 3]],
            hint="sum each loss and divide by the window's terms; a mean of means weights terms "
            "unequally",
        ),
    ),
    Gate(
        "grad-accum/short-window",
        # The last window has two.
        partial(
            compare_windows,
            sizes=[[2] * 4, [2] * 2],
            hint="take divisor and last microbatch from the window, not from the number of steps",
        ),
    ),
    Gate(
        "grad-accum/once",
        # Clipping, optimizer and schedule act once per window, on its whole gradient.
        partial(
            compare_windows,
            sizes=[[2] * 4] * 2,
            with_options=True,
            hint="clip, step and schedule after the last microbatch of the window, never inside it",
        ),
    ),
    Gate("grad-accum/scaled", scaled_window),
    Gate("grad-accum/random", random_numbers),
    Gate("grad-accum/two-ranks", two_ranks, on_ranks=True),
)
