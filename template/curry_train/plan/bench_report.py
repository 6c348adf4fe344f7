"""Benchmark results: one row per configuration, with notes on how far to trust its figures.

Proof: `python -m pytest tests/test_bench.py`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..core.paired import Ratio, Spread, drift_of

# The outcomes of a configuration.
MEASURED = "measured"
REFUSED = "refused"
FAILED = "failed"
TOO_LARGE = "out of memory"

WIDE = 0.25  # 10th to 90th percentile of the step times, as a fraction of the median
DRIFTED = 0.1  # change between the first and the last third of the rounds, as a fraction
OTHER_LOSS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@dataclass
class Figures:
    """Figures of one configuration; what was not measured is None."""

    name: str
    outcome: str = MEASURED  # measured, refused, failed or out of memory
    why: str = ""  # the reason for any outcome but measured
    num_changed: int = 0  # modules that the lever changed
    num_microbatches: int = 1
    num_terms: int = 0  # terms of the loss in one step
    seconds: list[float] = field(default_factory=list)  # of each timed step
    step: Spread | None = None
    ratio: Ratio | None = None  # step time over the plain step's of the same round
    terms_per_second: float | None = None
    peak_bytes: int | None = None
    peak_ratio: float | None = None  # peak over the plain configuration's
    model_flops: int | None = None  # of one optimizer step, without recompute
    executed_flops: int | None = None  # of one optimizer step, with recompute
    peak_flops_per_second: float | None = None  # of the device
    peak_source: str = ""
    mfu: float | None = None  # model FLOPs as a fraction of the device's peak
    hfu: float | None = None  # executed FLOPs as a fraction of the device's peak
    loss: float | None = None
    grad_norm: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def recompute_flops(self) -> int | None:
        if self.executed_flops is None or self.model_flops is None:
            return None
        return self.executed_flops - self.model_flops

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if self.ratio is not None:
            values["ratio"]["verdict"] = self.ratio.verdict
        return values


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

    @property
    def plain(self) -> Figures:
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.to_json() for row in self.rows]}


def complete(
    row: Figures, plain: Figures, *, same_model: bool, precision: torch.dtype | None
) -> None:
    """Derive ratios, throughput, MFU and HFU from the measured figures, and add warnings.

    `precision` is the dtype whose loss tolerance applies, None for a step that changes precision:
    its loss is not compared with the plain step's.
    """
    if row.step is None:
        return
    if row.peak_bytes is not None and plain.peak_bytes:
        row.peak_ratio = row.peak_bytes / plain.peak_bytes
    row.terms_per_second = row.num_terms / row.step.median

    if row.peak_flops_per_second and row.model_flops:
        row.mfu = row.model_flops / row.step.median / row.peak_flops_per_second
        if row.executed_flops is not None:
            row.hfu = row.executed_flops / row.step.median / row.peak_flops_per_second
    if max(row.mfu or 0.0, row.hfu or 0.0) > 1:
        row.notes.append(
            f"above the peak ({row.peak_source}), so that is not the peak for what ran: give --peak"
        )

    if row is not plain and same_model and precision is not None:
        row.notes += _training_notes(row, plain, OTHER_LOSS[precision])


def timing_notes(rows: Sequence[Figures]) -> list[str]:
    """Warn where step times spread widely or drift over the rounds."""
    notes = []
    timed = [row for row in rows if row.step is not None]
    wide = [row.name for row in timed if row.step is not None and row.step.relative > WIDE]
    if wide:
        which = "all steps" if len(wide) == len(timed) else f"the steps of {', '.join(wide)}"
        notes.append(
            f"{which} spread over more than {WIDE:.0%} of their median: do not rely on the "
            "seconds; use the ratios and their intervals, or run on a quiet machine"
        )
    drift = statistics.median(drift_of(row.seconds) for row in timed)
    if abs(drift - 1) > DRIFTED:
        cause = "raise --warmup" if drift < 1 else "the device may be hot"
        notes.append(
            f"the last rounds took {drift:.2f} of the time of the first rounds: {cause}, "
            "or other work ran on the machine"
        )
    return notes


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
    if not differences:
        return []
    return [
        f"{'; '.join(differences)}: changes the training result, unless random numbers or batch "
        "statistics are drawn per microbatch. Run the gates of the technique"
    ]
