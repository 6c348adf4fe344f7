"""Measure what each strategy saves and costs, and the largest batch that fits.

    rows = measure_savings(Case(load_workload("transformer")), ["full", "selective"])

Measured are bytes, recomputed FLOPs, step time, largest batch, and parity with `none`, which is
always measured as the reference. All models share one set of weights, and steps are timed in turns,
so that machine drift affects all alike.

Proof: `python -m pytest tests/bench/test_savings.py`.
"""

import bisect
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..core.blocks import blocks_if_any
from ..core.generators import seeded
from ..core.measure import bytes_on_device, count_flops, is_out_of_memory, measure_memory
from ..core.measure_compiled import count_executed_flops, holds_compiled_code, measure_allocated
from ..core.parity import OUTER_BOUND, StepRecord, compare, record_step
from ..core.wording import did_you_mean, format_bytes
from ..plan.profiler import MemoryProfiler
from ..primitives.strategies import STRATEGIES, moved_bytes
from ..workloads.models import BUILTIN_WORKLOADS
from ..workloads.workload import Case, Workload, WorkloadError, map_tensors
from .steps import (
    FAILED_OUTCOME,
    MEASURED_OUTCOME,
    OUT_OF_MEMORY_OUTCOME,
    SetupRow,
    Tell,
    TrainingStep,
    find_lever,
    ratio_of,
    require_plain,
    time_setups,
)

# Row of the savings benchmark: the figures of one strategy on one case.

REFERENCE_STRATEGY = "none"
# Rounds before those that are timed; in the first, caches and kernels warm up.
WARMUP_ROUNDS = 1


@dataclass
class SavingsRow(SetupRow):
    """Figures of one strategy on one case; ratios are to the strategy `none`."""

    workload: str = ""
    batch_size: int = 0
    depth: int | None = None
    # Names of the modules that the strategy changed.
    modules: list[str] = field(default_factory=list)
    held_bytes: int | None = None
    # Bytes held by the blocks alone: None for compiled code, 0 if the model repeats no block.
    blocks_held_bytes: int | None = None
    blocks_held_ratio: float | None = None
    forward_flops: int | None = None
    backward_flops: int = 0
    recompute_flops: int | None = None
    # Ratio to the FLOPs of one forward.
    recompute_ratio: float | None = None
    largest_batch: int | None = None
    parity: str = ""
    worst_error: float | None = None
    # Further figures that only this strategy has.
    facts: dict[str, float] = field(default_factory=dict)
    # Whether it moves tensors from memory to the same memory, as offload on a CPU does.
    stays_here: bool = False

    @property
    def is_wrong(self) -> bool:
        """Return whether the strategy failed or changed the training."""
        return self.outcome == FAILED_OUTCOME or self.parity.startswith("differs")

    @property
    def label(self) -> str:
        """Description of the case: workload, depth and batch size."""
        depth = f", depth {self.depth}" if self.depth else ""
        return f"{self.workload}{depth}, batch size {self.batch_size}"


# Find the largest batch whose training step fits into a number of bytes.

LARGEST_BATCH_TRIED = 2**24  # if a batch this large fits, memory does not depend on the batch size


def largest_batch(case: Case, model: nn.Module, limit: int) -> int:
    """Return the most samples whose step fits into `limit` bytes; 0 if not even one does.

    A step takes parameters, buffers, the batch, and the peak of forward and backward, gradients
    included.
    """

    def bytes_of(size: int) -> int:
        try:
            batch = case.batch(size)
            tensors = [*model.parameters(), *model.buffers()]
            map_tensors(batch, tensors.append)
            with seeded(case.seed):
                memory = measure_memory(model, batch, case.workload.mean_loss)
            return bytes_on_device(tensors, case.device) + memory.peak_bytes
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return sys.maxsize

    return search(bytes_of, limit, start=case.batch_size)


def check_limit(limit: int, device: torch.device) -> None:
    """Refuse a limit above the memory of the device, because steps are run to be measured."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit > total:
        raise ValueError(
            f"a limit of {format_bytes(limit)} is more than the {format_bytes(total)} of {device}, "
            "and batches are measured by running them; use a lower limit, or a larger machine"
        )


def search(bytes_of: Callable[[int], int], limit: int, *, start: int) -> int:
    """Return the largest size within the limit; it and the next larger size were both measured.

    A size is at most doubled from one try to the next.
    """
    high = start
    while bytes_of(high) <= limit:
        high *= 2
        if high > LARGEST_BATCH_TRIED:
            raise ValueError(
                f"{LARGEST_BATCH_TRIED:,} samples fit {format_bytes(limit)}: memory does not grow "
                "with the batch"
            )
    low = high // 2 if high > start else 0
    return low + bisect.bisect(range(low + 1, high), limit, key=bytes_of)


# Measure what each strategy saves and costs on a model.


def load_with_depth(spec: str, depth: int) -> Workload:
    """Load a built-in workload with that many blocks."""
    if spec not in BUILTIN_WORKLOADS:
        raise WorkloadError(
            f"depth applies to built-in workloads only ({', '.join(BUILTIN_WORKLOADS)}); set it in "
            f"{spec} itself"
        )
    factory: Callable[..., Workload] = BUILTIN_WORKLOADS[spec]
    return replace(factory(depth=depth), spec=spec)


def choose_strategies(names: Sequence[str]) -> list[str]:
    """Check the names and return them, or all strategies if empty; `none` always comes first."""
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(f"no strategy is called {name!r}; {did_you_mean(name, STRATEGIES)}")
    return list(dict.fromkeys([REFERENCE_STRATEGY, *(names or STRATEGIES)]))


def measure_savings(
    case: Case,
    strategies: Sequence[str] = (),
    *,
    depth: int | None = None,
    repeats: int = 5,
    limit: int | None = None,
    tell: Tell = lambda doing: None,
) -> list[SavingsRow]:
    """Measure one row for each strategy, `none` first.

    With `limit` in bytes, the largest batch that fits it is searched too. `depth` is only recorded
    in the rows.
    """
    rows = [
        SavingsRow(name, workload=case.workload.name, batch_size=case.batch_size, depth=depth)
        for name in choose_strategies(strategies)
    ]
    batch = case.batch()
    alive: list[tuple[SavingsRow, TrainingStep]] = []
    plain: StepRecord | None = None
    with seeded(case.seed):
        for row in rows:
            tell(f"{row.name}: memory, FLOPs, parity")
            step, record = _measure(row, case, batch, alive[0][1] if alive else None)
            if step is not None:
                alive.append((row, step))
            if row is rows[0]:
                plain = record
                # If the plain step does not fit into the device, the other rows get no ratios.
                if row.outcome != OUT_OF_MEMORY_OUTCOME:
                    require_plain(row, case)
            if record is not None and plain is not None:
                _compare(row, record, rows[0], plain, alive[0][1])
        time_setups(
            alive,
            case,
            run=lambda step: step.mean_loss(step.model, batch).backward(),
            rounds=repeats,
            warmup=WARMUP_ROUNDS,
            tell=tell,
        )
    for row, step in alive:
        if rows[0].outcome != MEASURED_OUTCOME:
            row.ratio = None
        if limit is not None:
            tell(f"{row.name}: largest batch")
            try:
                row.largest_batch = largest_batch(case, step.model, limit)
            except ValueError as error:
                row.why = str(error)
    return rows


def _measure(
    row: SavingsRow, case: Case, batch: Any, like: TrainingStep | None
) -> tuple[TrainingStep | None, StepRecord | None]:
    """Fill in what is not relative to the plain step; return the step, if it can be trained.

    The step that is recorded for parity comes first, while the model's buffers are still new.
    """
    step = None
    loss = case.workload.mean_loss
    try:
        with seeded(case.seed):
            step = TrainingStep(case, find_lever(row.name), batch=batch, like=like)
        model = step.model
        row.modules = step.changed
        own_batch = case.batch()
        with seeded(case.seed):
            record = record_step(model, own_batch, loss)
        with seeded(case.seed):
            # Compiled code runs as eager code under a dispatch mode, so it is measured without one.
            is_compiled = holds_compiled_code(model)
            memory = (measure_allocated if is_compiled else measure_memory)(model, own_batch, loss)
            flops = (count_executed_flops if is_compiled else count_flops)(model, own_batch, loss)
        row.held_bytes = memory.held_bytes
        row.peak_bytes = memory.peak_bytes
        row.forward_flops = flops.forward
        row.backward_flops = flops.backward
        if not is_compiled:
            with step.noting_autocast():
                row.blocks_held_bytes = _held_by_blocks(case, model)
        if row.name == "offload":
            row.facts = moved_bytes(model)
            row.stays_here = case.device.type == "cpu"
    except (ValueError, RuntimeError) as error:
        row.fail(error, case)
        return step if row.outcome == OUT_OF_MEMORY_OUTCOME else None, None
    return step, record


def _held_by_blocks(case: Case, model: nn.Module) -> int:
    """Return the bytes that the blocks alone hold; 0 if the model repeats none."""
    blocks = list(blocks_if_any(model, case.blocks))
    if not blocks:
        return 0
    with seeded(case.seed):
        loss = case.workload.mean_loss
        report = MemoryProfiler(model).profile(case.batch(), 1, loss=loss, blocks=blocks)
    return sum(one.bytes for one in report.layers if one.name in blocks)


def _compare(
    row: SavingsRow,
    record: StepRecord,
    plain_row: SavingsRow,
    plain: StepRecord,
    step: TrainingStep,
) -> None:
    """Fill in what is relative to the plain step; one whose loss is not finite is an error."""
    if not plain.loss.isfinite():
        raise WorkloadError(
            f"{row.label}: the loss of a plain step is {plain.loss.item()}, with which nothing "
            "can be compared: grad-flow names the layer that it begins in"
        )
    row.blocks_held_ratio = ratio_of(row.blocks_held_bytes, plain_row.blocks_held_bytes)
    row.peak_ratio = ratio_of(row.peak_bytes, plain_row.peak_bytes)
    row.recompute_flops = row.backward_flops - plain_row.backward_flops
    row.recompute_ratio = ratio_of(row.recompute_flops, plain_row.forward_flops)
    # Compiled code rounds less often than the autocast of the model.
    dtype = step.dtype_of_products if row.blocks_held_bytes is None else step.case.dtype
    parity = compare(plain, record, tolerance=OUTER_BOUND[dtype])
    row.worst_error = parity.worst if math.isfinite(parity.worst) else None
    description = parity.describe(most=1)
    row.parity = description if parity.holds else f"differs: {description}"
