"""Gates of gradient accumulation: it gives the gradients of the large batch.

Each gate takes the implementation as `train`, so that its tests can plant a wrong one. The model is
compared in eval mode: dropout and BatchNorm depend on the microbatch, and would differ for the
right implementation too.

Proof: `python -m pytest tests/gates/test_grad_accum.py`.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..core.parity import Parity, StepRecord, compare, record
from ..primitives.grad_accum import GradientAccumulation, NonFiniteWindow, train_window
from ..workloads.models import load_workload
from ..workloads.workload import Case, Workload, batch_size, take
from .fixtures import GradientSyncs, load_function, run_on_ranks
from .verdict import (
    Gate,
    Implementation,
    Judged,
    NotApplicable,
    Takes,
    Verdict,
    not_applicable,
    with_errors,
)

# In float32 only the order of summation differs: a few units of 6e-8 relative to a gradient's norm.
GRADIENT_TOLERANCE = 1e-6
# If the batch summed over two halves by hand differs by more than TOLERANCE, the tolerance is this
# many times that difference.
HALVED_BATCH_FACTOR = 3
# A larger difference between the batch and its halves is not rounding.
COUPLED_DIFFERENCE = 1e-3
Train = Callable[..., Any]
Windows = Callable[[Any, int, Callable[[Any], int]], Any]  # of microbatches, steps and count


def _our_windows(microbatches: Any, steps: int, count: Callable[[Any], int]) -> Any:
    return GradientAccumulation(steps).windows(microbatches, count=count)


def equal_windows(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare four equally weighted microbatches with one large batch."""
    found = _parity(case, sizes=[case.batch_size] * 4, train=train, windows=windows)
    return _verdict(
        "grad-accum/equal", found, "divide each summed loss once, by the terms of the whole window"
    )


def uneven_windows(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare microbatches of different sizes and, if the loss can be masked, token counts."""
    found = _parity(case, sizes=[1, 4, 2, 3], masked=True, train=train, windows=windows)
    return _verdict(
        "grad-accum/uneven",
        found,
        "sum each loss and divide by the window's terms; a mean of means weights terms unequally",
    )


def short_window(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare six microbatches in windows of four, where the last window has two."""
    found = _parity(case, sizes=[2] * 6, masked=True, steps=4, train=train, windows=windows)
    return _verdict(
        "grad-accum/short-window",
        found,
        "take divisor and last microbatch from the window, not from K",
    )


def once_per_window(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Check that clipping, optimizer and schedule run once per window, on its whole gradient."""
    steps = {"steps": 0, "schedule steps": 0}
    parity, tolerance = _parity(
        case,
        sizes=[2] * 8,
        masked=True,
        steps=4,
        clip=0.5,
        train=train,
        windows=windows,
        counted=steps,
    )
    expected = {"steps": 2, "schedule steps": 2}
    held = parity.holds and steps == expected
    measured = f"{parity.describe()}; {_counts(steps)}"
    required = f"clipped gradients within {tolerance:.1e}; {_counts(expected)}"
    hint = ""
    if not held:
        hint = "clip, step and schedule after the last microbatch of the window, never inside it"
    return Verdict("grad-accum/once", held, measured, required, hint)


def non_finite(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Check that a NaN loss in one microbatch stops the window before the weights change."""
    module = case.build().eval()
    workload = case.workload
    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    microbatches = list(enumerate(case.split(case.batch(4), [1] * 4)))

    def poisoned(model: nn.Module, numbered: tuple[int, Any]) -> torch.Tensor:
        return workload.loss(model, numbered[1]) * (float("nan") if numbered[0] == 2 else 1.0)

    (window,) = windows(microbatches, 4, lambda numbered: workload.count(numbered[1]))
    try:
        train(module, window, poisoned, optimizer)
        report = "no error"
    except NonFiniteWindow as error:
        report = "names microbatch 2" if "microbatch 2 " in str(error) else f"wrong place: {error}"

    changed = [
        name for name, value in module.state_dict().items() if not torch.equal(value, before[name])
    ]
    held = report == "names microbatch 2" and not changed and not optimizer.state
    return Verdict(
        "grad-accum/non-finite",
        held,
        f"{report}; {len(changed)} weights, {len(optimizer.state)} states changed",
        "names microbatch 2; 0 weights, 0 states changed",
        "" if held else "check loss and gradient norm before optimizer.step, on every rank",
    )


def two_ranks(case: Case, *, train: str | None = None) -> Verdict:
    """Compare DDP and FSDP2 on two gloo ranks with the large batch, with one sync per window.

    The ranks are separate processes on the CPU, so the workload and `train` are passed by name.
    """
    gate = "grad-accum/two-ranks"
    required = (
        f"{GRADIENT_TOLERANCE:.0e} or {HALVED_BATCH_FACTOR} times the halved batch's; "
        "1 sync a window"
    )
    if not case.workload.spec:
        return not_applicable(
            gate,
            required=required,
            why="the workload has no name, by which other processes could load it",
        )

    # Raises NotApplicable here and not in the other processes.
    _reference(replace(case, dtype=torch.float32), [case.batch(16)])
    arguments: dict[str, Any] = {
        "spec": case.workload.spec,
        "seed": case.seed,
        "train": train or f"{train_window.__module__}:train_window",
    }
    results = run_on_ranks(f"{__name__}:_rank_check", **arguments)

    worst = {}
    for kind in results[0]:
        of_ranks = [result[kind] for result in results]
        worst[kind] = max(of_ranks, key=lambda found: found["error"])
    held = all(
        found["error"] <= found["tolerance"] and found["syncs"] == 1.0 for found in worst.values()
    )
    measured = "; ".join(
        f"{kind} {found['error']:.1e}, syncs {found['syncs']:g}" for kind, found in worst.items()
    )
    hint = ""
    if not held:
        hint = (
            "divide by the terms of all ranks; use no_sync or set_requires_gradient_sync until the "
            "window's last microbatch"
        )
    return Verdict(gate, held, measured, required, hint)


def _windows(given: Implementation, present: Any) -> Windows:
    return lambda microbatches, steps, count: given.value(steps=steps).windows(
        microbatches, count=count
    )


JUDGED_CALLABLES = (
    Judged("train_window", lambda model, window, loss, optimizer, *, clip_norm, scheduler: None),
    Judged("GradientAccumulation", lambda *, steps: None),
)
TRAIN_TAKES = {
    "train_window": Takes("train", with_errors(NonFiniteWindow)),
    "GradientAccumulation": Takes("windows", _windows),
}
# The ranks load the function by its name.
TRAIN_BY_NAME = {"train_window": Takes("train", lambda given, present: given.spec)}

GATES = (
    Gate("grad-accum/equal", equal_windows, TRAIN_TAKES),
    Gate("grad-accum/uneven", uneven_windows, TRAIN_TAKES),
    Gate("grad-accum/short-window", short_window, TRAIN_TAKES),
    Gate("grad-accum/once", once_per_window, TRAIN_TAKES),
    Gate("grad-accum/non-finite", non_finite, TRAIN_TAKES),
    Gate("grad-accum/two-ranks", two_ranks, TRAIN_BY_NAME),
)


def _parity(
    case: Case,
    *,
    sizes: Sequence[int],
    train: Train,
    windows: Windows,
    masked: bool = False,
    steps: int | None = None,
    clip: float | None = None,
    counted: dict[str, int] | None = None,
) -> tuple[Parity, float]:
    """Compare accumulated gradients after the last window with large batches trained by hand.

    Returns the comparison and its tolerance.
    """
    case = replace(case, dtype=torch.float32)
    workload = case.workload
    steps = steps or len(sizes)
    batch = case.batch(sum(sizes))
    if masked and workload.mask:
        batch = workload.mask(batch)
    microbatches = case.split(batch, sizes)

    candidate = case.build().eval()
    _same_twice(case, candidate)
    optimizer, scheduler = _optimizer(candidate)
    if counted is not None:
        optimizer.register_step_post_hook(lambda *_: counted.update(steps=counted["steps"] + 1))
    for window in windows(microbatches, steps, workload.count):
        loss = train(
            candidate, window, workload.loss, optimizer, clip_norm=clip, scheduler=scheduler
        ).loss
    if counted is not None:
        counted["schedule steps"] = scheduler.last_epoch

    ends = [sum(sizes[:end]) for end in [*range(0, len(sizes), steps), len(sizes)]]
    large = [take(batch, slice(start, end)) for start, end in itertools.pairwise(ends)]
    reference, tolerance = _reference(case, large, clip=clip)
    last = torch.tensor(loss, dtype=reference.loss.dtype, device=reference.loss.device)
    return compare(reference, record(candidate, last), tolerance=tolerance), tolerance


def _reference(
    case: Case, windows: Sequence[Any], *, clip: float | None = None
) -> tuple[StepRecord, float]:
    """Train the large batches by hand; return the record of the last one and the tolerance.

    The tolerance is 1e-6, or more for a model whose gradients differ by more than that when each
    batch is summed over two halves.
    """
    whole = _by_hand(case, windows, num_parts=1, clip=clip)
    halved = _by_hand(case, windows, num_parts=2, clip=clip)
    difference = compare(whole, halved).worst
    if difference > COUPLED_DIFFERENCE:
        why = (
            f"a batch's loss differs by {difference:.1e} from the sum over its halves: the loss "
            "couples samples, or is not a sum, which a Workload has to return"
        )
        raise NotApplicable(why, required=f"halves that add up within {COUPLED_DIFFERENCE:.0e}")
    return whole, max(GRADIENT_TOLERANCE, HALVED_BATCH_FACTOR * difference)


def _by_hand(
    case: Case, windows: Sequence[Any], *, num_parts: int, clip: float | None
) -> StepRecord:
    """Train the windows in a plain loop that sums each batch over `num_parts` parts."""
    module = case.build().eval()
    optimizer, scheduler = _optimizer(module)
    for batch in windows:
        optimizer.zero_grad()
        rows = -(-batch_size(batch) // num_parts)
        count = case.workload.count(batch)
        total = torch.zeros(())
        for start in range(0, batch_size(batch), rows):
            value = case.workload.loss(module, take(batch, slice(start, start + rows))) / count
            value.backward()
            total = total.to(value) + value.detach()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return record(module, total)


def _optimizer(
    module: nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
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


def _verdict(gate: str, found: tuple[Parity, float], hint: str) -> Verdict:
    parity, tolerance = found
    required = f"gradients within {tolerance:.1e} of the large batch"
    return Verdict(gate, parity.holds, parity.describe(), required, "" if parity.holds else hint)


def _counts(steps: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in steps.items())


def _rank_check(spec: str, seed: int, train: str) -> dict[str, dict[str, float]]:
    """Train one rank's part of an uneven masked window with DDP and FSDP2.

    Each is compared with the whole batch trained without ranks.
    """
    workload = load_workload(spec)
    num_ranks = dist.get_world_size()
    case = Case(workload, seed=seed)
    batch = Case(workload, seed=seed).batch(8 * num_ranks)
    if workload.mask:
        batch = workload.mask(batch)
    microbatches = case.split(batch, [1, 4, 3] * num_ranks)[3 * dist.get_rank() :][:3]
    reference, tolerance = _reference(case, [batch])

    mesh = init_device_mesh("cpu", (num_ranks,))
    wraps: dict[str, Callable[[nn.Module], Any]] = {
        "DDP": functools.partial(
            DistributedDataParallel, find_unused_parameters=None in reference.gradients.values()
        ),
        "FSDP2": functools.partial(fully_shard, mesh=mesh),
    }
    return {
        kind: _rank_parity(reference, wrap(case.build().eval()), microbatches, workload, train)
        | {"tolerance": tolerance}
        for kind, wrap in wraps.items()
    }


def _rank_parity(
    reference: StepRecord, model: nn.Module, microbatches: list[Any], workload: Workload, train: str
) -> dict[str, float]:
    for _ in range(2):  # DDP rebuilds its buckets after the first backward
        with GradientSyncs() as one_backward:
            workload.loss(model, microbatches[0]).backward()
    window = next(
        GradientAccumulation(len(microbatches)).windows(microbatches, count=workload.count)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with GradientSyncs() as syncs:
        loss = load_function(train)(model, window, workload.loss, optimizer).loss
    step = record(model, torch.tensor(loss, dtype=reference.loss.dtype))
    gradients = {
        name.removeprefix("module."): gradient for name, gradient in step.gradients.items()
    }
    candidate = replace(reference, loss=step.loss, gradients=gradients)
    return {
        "error": compare(reference, candidate).worst,
        "syncs": syncs.num_calls / one_backward.num_calls,
    }
