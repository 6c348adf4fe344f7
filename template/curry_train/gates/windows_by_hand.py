"""Windows trained in a loop by hand: the reference of the gates of accumulation.

`windows_parity` compares accumulated gradients with large batches that are trained by hand, and
finds the tolerance from how much such a loop differs where it sums over microbatches. A gate of
parameters that step in backward compares them with a loop by hand that steps after it.

Proof: `python -m pytest tests/gates/test_grad_accum.py tests/gates/test_adapters.py`.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.parity import GRADIENT_TOLERANCES, Parity, StepRecord, check_comparable, compare, record
from ..core.rerun import seeded
from ..primitives.grad_accum import GradientAccumulation, StepInBackward, train_window
from ..workloads.workload import Case, batch_size
from .verdict import Gate, Judged, NotApplicable, Takes, Verdict, not_applicable

# If the batch summed by hand over its microbatches differs by more than this, the tolerance is so
# many times that difference.
DIVIDED_BATCH_FACTOR = 3
# Rounding is smaller by more than this in float64; the coupling of samples is not.
ROUNDING_FACTOR = 4
# Where a model does not run in float64, a difference above this is no rounding.
COUPLED_DIFFERENCE = 1e-3
MOST_LEARNING_RATE = 0.1
Train = Callable[..., Any]
Windows = Callable[[Any, int, Callable[[Any], int]], Any]  # of microbatches, steps and count


def windows_parity(
    case: Case,
    *,
    sizes: Sequence[int],
    train: Train,
    windows: Windows,
    masked: bool = False,
    steps: int | None = None,
    clip_share: float | None = None,
    scale: float | None = None,
    counted: dict[str, int] | None = None,
) -> tuple[Parity, float]:
    """Compare accumulated gradients after the last window with large batches trained by hand.

    `clip_share` clips to this share of the first window's gradient norm, and `scale` scales the
    losses. Returns the comparison and its tolerance.
    """
    workload = case.workload
    steps = steps or len(sizes)
    batch = case.batch(sum(sizes))
    if masked and workload.mask:
        batch = workload.mask(batch)
    microbatches = case.split(batch, sizes)

    candidate = case.build().eval()
    _same_twice(case, candidate)
    starts = range(0, len(sizes), steps)
    by_hand = [microbatches[start : start + steps] for start in starts]
    norm = _gradient_norm(case, by_hand[0])
    clip = None if clip_share is None else clip_share * norm
    rate = _rate(candidate, clip or norm)
    reference, tolerance = reference_by_hand(case, by_hand, batch, clip=clip, rate=rate)
    optimizer, scheduler = sgd_with_schedule(candidate, rate)
    options: dict[str, Any] = {"clip_norm": clip, "scheduler": scheduler}
    if scale is not None:
        options["scaler"] = torch.amp.GradScaler(case.device.type, init_scale=scale)
    if counted is not None:
        optimizer.register_step_post_hook(lambda *_: counted.update(steps=counted["steps"] + 1))
    for window in windows(microbatches, steps, workload.count):
        loss = train(candidate, window, workload.loss, optimizer, **options).loss
    if counted is not None:
        counted["schedule steps"] = scheduler.last_epoch

    last = torch.tensor(loss, dtype=reference.loss.dtype, device=reference.loss.device)
    return compare(reference, record(candidate, last), tolerance=tolerance), tolerance


def _rate(module: nn.Module, gradient_norm: float) -> float:
    """Return a learning rate at which the first step changes the weights by a tenth at most."""
    weights = math.hypot(*(one.detach().norm().item() for one in module.parameters()))
    share = weights / gradient_norm if gradient_norm > 0 else 1.0
    return MOST_LEARNING_RATE * min(1.0, share or 1.0)


def reference_by_hand(
    case: Case,
    windows: Sequence[Sequence[Any]],
    batch: Any,
    *,
    clip: float | None = None,
    rate: float = 0.0,
) -> tuple[StepRecord, float]:
    """Train the batch by hand, a window at a time; return the last record and the tolerance.

    The tolerance is that of the dtype, or more for a model whose gradients differ by more than that
    when a loop by hand sums each window over its microbatches.
    """
    settings = {"clip": clip, "rate": rate}
    whole, difference = _divided_difference(case, windows, batch, **settings)
    check_comparable(whole)
    tolerance = GRADIENT_TOLERANCES[case.dtype]
    if difference > tolerance and not _is_rounding(case, windows, batch, difference, **settings):
        why = (
            f"a batch's loss or gradient differs by {difference:.1e} from the sum over its parts, "
            "and not by rounding: the loss couples samples, or is not a sum, which a Workload has "
            "to return"
        )
        raise NotApplicable(why, required="parts that add up to the batch")
    return whole, max(tolerance, DIVIDED_BATCH_FACTOR * difference)


def _divided_difference(
    case: Case,
    windows: Sequence[Sequence[Any]],
    batch: Any,
    **settings: Any,
) -> tuple[StepRecord, float]:
    """Train by hand on whole windows and on microbatches.

    Returns the record of the whole windows, and the difference.
    """
    sizes = [sum(map(batch_size, window)) for window in windows]
    whole = _by_hand(case, [[window] for window in case.split(batch, sizes)], **settings)
    return whole, compare(whole, _by_hand(case, windows, **settings)).worst


def _is_rounding(
    case: Case,
    windows: Sequence[Sequence[Any]],
    batch: Any,
    difference: float,
    **settings: Any,
) -> bool:
    """Return whether a difference is much smaller in float64."""
    precise = replace(case, dtype=torch.float64)
    placed = [list(map(precise.place, window)) for window in windows]
    try:
        _, remaining = _divided_difference(precise, placed, precise.place(batch), **settings)
    except (RuntimeError, TypeError):
        # The model or the device computes in other dtypes alone.
        scale = GRADIENT_TOLERANCES[case.dtype] / GRADIENT_TOLERANCES[torch.float32]
        return difference <= COUPLED_DIFFERENCE * min(scale, 100)
    return ROUNDING_FACTOR * remaining < difference


def _by_hand(
    case: Case, windows: Sequence[Sequence[Any]], *, clip: float | None = None, rate: float = 0.0
) -> StepRecord:
    """Train the windows in a plain loop that sums each over its microbatches."""
    module = case.build().eval()
    optimizer, scheduler = sgd_with_schedule(module, rate)
    for window in windows:
        optimizer.zero_grad()
        count = sum(map(case.workload.count, window))
        total = torch.zeros(())
        for microbatch in window:
            value = case.workload.loss(module, microbatch) / count
            value.backward()
            total = total.to(value) + value.detach()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return record(module, total)


def _gradient_norm(case: Case, window: Sequence[Any]) -> float:
    gradients = _by_hand(case, [window]).gradients.values()
    return math.hypot(*(one.norm().item() for one in gradients if one is not None))


def sgd_with_schedule(
    module: nn.Module, rate: float
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def _same_twice(case: Case, module: nn.Module) -> None:
    with torch.no_grad():
        first, second = (case.workload.loss(module, case.batch()) for _ in range(2))
    if not torch.equal(first, second):
        raise ValueError(
            f"{case.workload.name} gives {first.item():.6g} and then {second.item():.6g} for the "
            "same batch in eval mode, so nothing can be compared: draw random numbers only if "
            "module.training is set"
        )


def accumulate_by_hand(
    module: nn.Module, microbatches: Sequence[Any], loss: Any, count: Callable[[Any], int]
) -> torch.Tensor:
    """Run forward and backward of each microbatch; return the mean loss of the window."""
    terms = sum(map(count, microbatches))
    total = torch.zeros(())
    for microbatch in microbatches:
        value = loss(module, microbatch) / terms
        value.backward()
        total = total.to(value) + value.detach()
    return total


# Parameters that step in backward.

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Steps = Callable[[Any, MakeOptimizer], Any]
CLIP_NORM = 1.0


def stepped_in_backward(
    case: Case, *, optimizer: Steps = StepInBackward, train: Callable[..., Any] | None = None
) -> Verdict:
    """Compare windows whose parameters step in backward with a loop by hand that steps after it.

    A copy of the optimizer takes the last window. `train` is the `train_window` beside the
    optimizer's class. It must refuse a clip by the norm of all gradients, of which most would have
    been applied before it is known.
    """
    gate = "grad-accum/in-backward"
    required = "weights bit-equal, at most 1 gradient at a time, a clip refused"
    beside = sys.modules[getattr(optimizer, "__module__", __name__)]
    taken: Any = train or getattr(beside, "train_window", train_window)
    expected, again = (_stepped_after(case) for _ in range(2))
    if _num_different(expected, again):
        why = "a loop by hand does not repeat itself bit for bit"
        return not_applicable(gate, required=required, why=why)

    module = case.build()
    found = optimizer(module.parameters(), _maker(case))
    most = 0

    def count(parameter: Tensor) -> None:
        nonlocal most
        most = max(most, _num_gradients(module))

    with seeded(case.seed):
        for window in _windows(case):
            if len(window) == 1:
                # No gradient waits for another one here.
                found = _copied(found, module)
            most = 0
            hooks = _hooked(module, count)
            taken(module, window, case.workload.loss, found)
            for hook in hooks:
                hook.remove()
    different = _num_different(expected, module.state_dict())
    most = max(most, _num_gradients(module))
    is_refused, changed = _clipped(case, optimizer, taken)
    measured = f"{different} weights differ, {most} gradients at a time; clip: "
    measured += f"{'refused' if is_refused else 'taken'}, {changed} weights changed"
    hint = ""
    if different:
        hint = "step once, on the gradient of the whole window; copies need the state too"
    elif most > 1:
        hint = "step and free each gradient in the parameter's own hook of the last backward"
    elif not is_refused or changed:
        hint = "refuse a clip by the norm of all gradients before the first backward"
    return Verdict(gate, not hint, measured, required, hint)


def _copied(optimizer: Any, module: nn.Module) -> Any:
    """Copy an optimizer, which steps the same parameters in place of the first from now on."""
    copied = copy.deepcopy(optimizer, {id(one): one for one in module.parameters()})
    if hasattr(copied, "attach"):
        optimizer.detach()
        copied.attach()
    return copied


def _windows(case: Case) -> Iterator[Any]:
    # BatchNorm in training needs two samples.
    sizes = [2] * 5
    microbatches = case.split(case.batch(sum(sizes)), sizes)
    return GradientAccumulation(2).windows(microbatches, count=case.workload.count)


def _maker(case: Case) -> MakeOptimizer:
    rate = 1e-2 if case.dtype.itemsize == 2 else 1e-3
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, foreach=False)


def _stepped_after(case: Case) -> dict[str, Any]:
    """Train by hand with a step after the backward of each window; return the weights."""
    module = case.build()
    optimizer = _maker(case)([one for one in module.parameters() if one.requires_grad])
    with seeded(case.seed):
        for window in _windows(case):
            optimizer.zero_grad()
            for microbatch in window:
                (case.workload.loss(module, microbatch) / window.loss_divisor).backward()
            optimizer.step()
    return module.state_dict()


def _clipped(case: Case, optimizer: Steps, train: Callable[..., Any]) -> tuple[bool, int]:
    """Return whether a window with a clip is refused, and how many weights have changed."""
    module = case.build()
    before = {name: value.clone() for name, value in _tensors(module.state_dict()).items()}
    found = optimizer(module.parameters(), _maker(case))
    window = next(_windows(case))
    try:
        train(module, window, case.workload.loss, found, clip_norm=CLIP_NORM)
        is_refused = False
    except ValueError:
        is_refused = True
    return is_refused, _num_different(before, module.state_dict())


def _hooked(module: nn.Module, call: Callable[[Tensor], None]) -> list[Any]:
    return [
        parameter.register_post_accumulate_grad_hook(call)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]


def _num_gradients(module: nn.Module) -> int:
    return sum(parameter.grad is not None for parameter in module.parameters())


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _num_different(expected: dict[str, Any], found: dict[str, Any]) -> int:
    others = _tensors(found)
    return sum(not torch.equal(value, others[name]) for name, value in _tensors(expected).items())


IN_BACKWARD_JUDGED = (Judged("StepInBackward", lambda parameters, make: None),)
IN_BACKWARD_GATES = (
    Gate("grad-accum/in-backward", stepped_in_backward, {"StepInBackward": Takes("optimizer")}),
)
