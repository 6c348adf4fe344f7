"""Compare levers in one benchmark and report ratios with intervals.

Notes name what disturbs a comparison, such as times that spread widely.

Proof: `python -m pytest tests/bench/test_bench_steps.py`.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..core.generators import seed_generators, seeded
from ..core.measure import is_out_of_memory
from ..core.timing import Clock
from ..plan.device import peak_rate
from ..primitives.grad_accum import NonFiniteWindow
from ..workloads.workload import Case, Workload, WorkloadError
from .steps import (
    PLAIN_LEVER,
    Lever,
    Optimizer,
    SetupRow,
    Tell,
    TrainingStep,
    ratio_of,
    require_plain,
    time_setups,
)

# Benchmark results: one row per configuration, with notes on how far to trust its figures.

WIDE_SPREAD = 0.25  # 10th to 90th percentile of the step times, as a fraction of the median
LOSS_TOLERANCE = 1e-4
LOSS_TOLERANCE_OF_HALF = 5e-2  # of bfloat16 and float16


@dataclass
class Figures(SetupRow):
    """Figures of one configuration."""

    num_microbatches: int = 1
    num_terms: int = 0  # terms of the loss in one step
    terms_per_second: float | None = None
    model_flops: int | None = None  # of one optimizer step, without recompute
    executed_flops: int | None = None  # of one optimizer step, with recompute
    peak_flops_per_second: float | None = None  # of the device
    peak_source: str = ""
    mfu: float | None = None  # model FLOPs as a fraction of the device's peak
    hfu: float | None = None  # executed FLOPs as a fraction of the device's peak
    loss: float | None = None
    grad_norm: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """All configurations on one batch; the first row is the plain one."""

    workload: str
    device: str
    dtype: str
    optimizer: str
    batch_size: int
    rounds: int
    warmup: int
    unit: str  # of a loss term: samples, tokens or terms
    rows: list[Figures]
    notes: list[str] = field(default_factory=list)  # about the machine

    def to_json(self) -> dict[str, Any]:
        figures = asdict(self)
        for row, values in zip(self.rows, figures["rows"], strict=True):
            if row.ratio is not None:
                values["ratio"]["verdict"] = row.ratio.verdict
        return figures


def complete_figures(row: Figures, plain: Figures, *, precision: torch.dtype | None) -> None:
    """Derive ratios, throughput, MFU and HFU from the measured figures, and add warnings.

    `precision` is the dtype whose loss tolerance applies. It is None for another model or
    precision, whose loss is not compared with the plain step's.
    """
    if row.step is None:
        return
    seconds = row.step.median
    row.peak_ratio = ratio_of(row.peak_bytes, plain.peak_bytes)
    row.terms_per_second = row.num_terms / seconds

    if row.peak_flops_per_second and row.model_flops and row.executed_flops is not None:
        row.mfu = row.model_flops / seconds / row.peak_flops_per_second
        row.hfu = row.executed_flops / seconds / row.peak_flops_per_second
        if max(row.mfu, row.hfu) > 1:
            row.notes.append(
                f"above the peak ({row.peak_source}), so that is not the peak for what ran: "
                "give --peak"
            )

    # Levers have those of the plain step.
    share = ratio_of(row.model_flops, plain.model_flops)
    if share and abs(share - 1) > 0.02:
        row.notes.append(f"executes {share:.0%} of the FLOPs of the plain step")
    if row is not plain and precision is not None:
        is_half = precision.itemsize < torch.float32.itemsize
        bound = LOSS_TOLERANCE_OF_HALF if is_half else LOSS_TOLERANCE
        row.notes += _training_notes(row, plain, bound)


def timing_notes(rows: Sequence[Figures]) -> list[str]:
    """Warn where step times spread widely."""
    wide = [row.name for row in rows if row.step and row.step.relative > WIDE_SPREAD]
    return wide and [
        f"the steps of {', '.join(wide)} spread over more than {WIDE_SPREAD:.0%} of their median: "
        "do not rely on the seconds; use the ratios and their intervals, or run on a quiet machine"
    ]


def _training_notes(row: Figures, plain: Figures, bound: float) -> list[str]:
    """Warn where loss or gradient norm differ from plain: the lever may skip part of the work."""
    differences = []
    for what, ours, theirs in (
        ("loss", row.loss, plain.loss),
        ("gradient norm", row.grad_norm, plain.grad_norm),
    ):
        if ours is None or theirs is None or math.isclose(ours, theirs, rel_tol=bound):
            continue
        differences.append(f"{what} {ours:.5g}, plain {theirs:.5g}")
    return differences and [
        f"{'; '.join(differences)}: changes the training result, unless random numbers or batch "
        "statistics are drawn per microbatch. Run the gates of the technique"
    ]


# Benchmark levers: time whole optimizer steps in turns, in one process.


def measure_levers(
    case: Case,
    levers: Sequence[Lever] = (),
    *,
    against: Sequence[Workload] = (),
    optimizer: Optimizer = "adamw",
    rounds: int = 20,
    warmup: int = 5,
    peak: float | str | None = None,
    clock: Clock = time.perf_counter,
    tell: Tell = lambda doing: None,
) -> Bench:
    """Measure the plain step, one step per lever, and the plain steps of other models.

    All take the same batch. A lever that does not apply to the model, or does not fit, gives a row
    with the reason; a plain step that can't run is an error. `peak` is the device's peak for MFU
    and HFU: FLOP/s, or "measured"; None looks it up by the name of the device. `tell` receives
    progress messages.
    """
    setups = [(PLAIN_LEVER, case), *((lever, case) for lever in levers)]
    for other in against:
        setups.append((Lever(other.spec or other.name), replace(case, workload=other)))
    batch = case.batch()
    rows: list[Figures] = []
    alive: list[tuple[Figures, TrainingStep]] = []
    with seeded(case.seed):
        for lever, own in setups:
            tell(f"{lever.name}: memory and FLOPs")
            row = Figures(lever.name)
            rows.append(row)
            try:
                like = alive[0][1] if alive and own is case else None
                step = TrainingStep(own, lever, batch=batch, optimizer=optimizer, like=like)
                _measure(step, row, case, peak)
                row.model_flops = rows[0].executed_flops if like else row.executed_flops
                alive.append((row, step))
            except WorkloadError:
                raise
            except (ValueError, RuntimeError, NonFiniteWindow) as error:
                row.fail(error, own)
            require_plain(rows[0], case)

        time_setups(
            alive,
            case,
            run=TrainingStep.__call__,
            rounds=rounds,
            warmup=warmup,
            clock=clock,
            tell=tell,
        )
        require_plain(rows[0], case)
    plain = alive[0][1]
    dtype = plain.dtype_of_products
    for row, step in alive:
        is_same = step.case.workload is case.workload and step.dtype_of_products == dtype
        complete_figures(row, rows[0], precision=dtype if is_same else None)
    return Bench(
        workload=case.workload.name,
        device=str(case.device),
        dtype=str(case.dtype).removeprefix("torch."),
        optimizer=str(getattr(optimizer, "__qualname__", optimizer)),
        batch_size=case.batch_size,
        rounds=rounds,
        warmup=warmup,
        unit=plain.unit,
        rows=rows,
        notes=timing_notes(rows),
    )


def _measure(step: TrainingStep, row: Figures, case: Case, peak: float | str | None) -> None:
    """Fill in everything but the time, after a first step, which creates the optimizer state."""
    seed_generators(case.seed)
    try:
        result = step()
    except (ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        ours, theirs = (one.spec or one.name for one in (case.workload, step.case.workload))
        if case.workload is step.case.workload or is_out_of_memory(error):
            raise
        raise WorkloadError(
            f"{theirs} can't take the batch of {ours}, on which both are compared: "
            f"{type(error).__name__}: {error}. Let both factories return (module, batch) with "
            "batches of the same structure"
        ) from error
    row.loss = result.loss
    row.grad_norm = result.grad_norm
    row.num_terms = result.num_terms
    row.num_microbatches = len(step.window)
    row.executed_flops = step.count_flops()
    row.peak_bytes = step.peak_bytes()
    rate = peak_rate(step.case.device, step.dtype_of_products, given=peak)
    row.peak_flops_per_second = rate.flops_per_second
    row.peak_source = rate.source
    if step.lever.changes and not step.changed:
        row.notes.append("changes nothing here: the steps are the same as plain")
    if row.peak_bytes is None:
        row.notes.append(
            "no peak: on the CPU, compiled code that accumulates gradients can't be followed"
        )
