"""Gates of gradient accumulation: it gives the gradients of the large batch.

A large batch is compared in eval mode: dropout and BatchNorm depend on the microbatch, and would
differ for the right implementation too. Judged are the gradients and counts of the optimizer's and
schedule's steps, the weights, and the syncs between ranks.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_grad_accum.py`.
"""

import math
import os
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.generators import seeded
from ..core.parity import GRADIENT_TOLERANCES
from ..primitives.grad_accum import GradientAccumulation, train_window
from ..workloads.from_script import launcher_variables
from ..workloads.workload import Case
from .implementation import takes
from .two_ranks import Found, GradientSyncs, Measured, Wrapped, compare_on_ranks, under_both
from .verdict import Gate, NotApplicable, Outcome
from .windows_by_hand import (
    DIVIDED_BATCH_FACTOR,
    Observed,
    Train,
    compare_windows,
    observe,
    reference_by_hand,
    train_by_hand,
    window_by_hand,
)

RANK_SIZES = [1, 4, 3]  # of the microbatches of one rank
LOSS_SCALE = 2.0**10  # under a scaler


def scaled_window(case: Case, *, train_window: Train = train_window) -> Outcome:
    """Compare a window under a gradient scaler, clipped, with one trained by hand without it.

    A gradient that overflows must skip the step and the schedule.
    """
    if not takes(train_window, "scaler"):
        raise NotApplicable("the implementation takes no gradient scaler")
    if any(one.is_complex() and one.requires_grad for one in case.build().parameters()):
        raise NotApplicable(
            "the model has complex parameters, and torch's scaler takes no complex gradients"
        )
    if case.device.type == "cuda" and case.dtype is torch.bfloat16:
        raise NotApplicable("torch's scaler takes no bfloat16 gradients on CUDA")
    measured, required, hint = compare_windows(
        case,
        train_window=train_window,
        sizes=[2] * 4,
        with_options=True,
        scaler=torch.amp.GradScaler(case.device.type, init_scale=LOSS_SCALE),
        hint="unscale once per window, after the last backward and before clipping",
    )

    def overflowing(model: nn.Module, microbatch: Any) -> Tensor:
        value = case.workload.loss(model, microbatch)
        value.register_hook(lambda gradient: gradient * math.inf)
        return value

    overflowed = observe(
        case.build().eval(),
        [window_by_hand(case, case.split(case.batch(8), [2] * 4))],
        train_window,
        overflowing,
        is_scheduled=takes(train_window, "scheduler"),
        scaler=torch.amp.GradScaler(case.device.type),
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
    window = window_by_hand(case, case.split(case.batch(sum(sizes)), sizes))

    def training(train: Train) -> tuple[Observed, list[float]]:
        draws: list[float] = []

        def loss(model: nn.Module, microbatch: Any) -> Tensor:
            draws.append(torch.rand(()).item())
            return case.workload.loss(model, microbatch)

        with seeded(case.seed):
            return observe(case.build(), [window], train, loss), draws

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
    batch = case.batch(2 * sum(RANK_SIZES))
    reference_by_hand(case, [case.split(batch, 2 * RANK_SIZES)], batch)
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
    of_ranks = case.split(batch, RANK_SIZES * num_ranks)
    microbatches = of_ranks[len(RANK_SIZES) * rank :][: len(RANK_SIZES)]
    reference, tolerance = reference_by_hand(case, [of_ranks], batch)
    (window,) = GradientAccumulation(len(RANK_SIZES)).windows(
        microbatches, count=case.workload.count
    )

    def measure(wrapped: Wrapped, kind: str) -> Measured:
        model = wrapped()

        def measure_window(train: Train) -> tuple[float, int]:
            model.zero_grad(set_to_none=True)
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

    return under_both(case, microbatches, measure)


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
            sizes=(1, 4, 2, 3),
            is_masked=True,
            hint="sum each loss and divide by the window's terms; a mean of means weights terms "
            "unequally",
        ),
    ),
    Gate(
        "grad-accum/short-window",
        # The last window has two.
        partial(
            compare_windows,
            sizes=[2] * 6,
            num_steps=4,
            is_masked=True,
            hint="take divisor and last microbatch from the window, not from the number of steps",
        ),
    ),
    Gate(
        "grad-accum/once",
        # Clipping, optimizer and schedule act once per window, on its whole gradient.
        partial(
            compare_windows,
            sizes=[2] * 8,
            num_steps=4,
            is_masked=True,
            with_options=True,
            hint="clip, step and schedule after the last microbatch of the window, never inside it",
        ),
    ),
    Gate("grad-accum/scaled", scaled_window),
    Gate("grad-accum/random", random_numbers),
    Gate("grad-accum/two-ranks", two_ranks, on_ranks=True),
)
