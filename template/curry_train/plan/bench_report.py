"""What a benchmark found: a row for each configuration, and what the figures must not be taken for.

Proof: `python -m pytest tests/test_bench.py`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..core.paired import Ratio, Spread, drift_of

MEASURED, REFUSED, FAILED, TOO_LARGE = "measured", "refused", "failed", "out of memory"
WIDE = 0.25  # from the tenth to the ninetieth of a hundred, as a part of the median
DRIFTED = 0.1  # between the first and the last third
OTHER_LOSS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@dataclass
class Figures:
    """One configuration. `outcome` is measured, refused, failed or out of memory, and `why` says more; what was not
    measured is None. Ratios are to the plain configuration, times to its steps of the same rounds. FLOPs are those of
    one optimizer step: the model's, and what ran, recompute included; `mfu` and `hfu` are their parts of the peak."""

    name: str
    outcome: str = MEASURED
    why: str = ""
    num_changed: int = 0
    num_microbatches: int = 1
    num_terms: int = 0
    seconds: list[float] = field(default_factory=list)
    step: Spread | None = None
    ratio: Ratio | None = None
    terms_per_second: float | None = None
    peak_bytes: int | None = None
    peak_ratio: float | None = None
    model_flops: int | None = None
    executed_flops: int | None = None
    peak_flops_per_second: float | None = None
    peak_source: str = ""
    mfu: float | None = None
    hfu: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def recompute_flops(self) -> int | None:
        if self.executed_flops is None or self.model_flops is None:
            return None
        return self.executed_flops - self.model_flops

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        if self.ratio is not None:
            found["ratio"]["verdict"] = self.ratio.verdict
        return found


@dataclass
class Bench:
    """All configurations on one batch; the first row is the plain one. `notes` are about the machine."""

    workload: str
    device: str
    dtype: str
    optimizer: str
    batch_size: int
    rounds: int
    warmup: int
    unit: str
    rows: list[Figures]
    notes: list[str] = field(default_factory=list)

    @property
    def plain(self) -> Figures:
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.to_json() for row in self.rows]}


def complete(
    row: Figures, plain: Figures, *, same_model: bool, precision: torch.dtype | None
) -> None:
    """Fill in what follows from a row's seconds, FLOPs and bytes, and say what they must not be taken for. `precision`
    is that of all steps that are to have plain's loss, None for a step whose own precision differs."""
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
            f"above the peak ({row.peak_source}): that is not the peak of what ran; give --peak"
        )
    if row is not plain and same_model and precision is not None:
        row.notes += _training_notes(row, plain, OTHER_LOSS[precision])


def timing_notes(rows: Sequence[Figures]) -> list[str]:
    """What is to be known of the seconds before they are believed."""
    said = []
    timed = [row for row in rows if row.step is not None]
    wide = [row.name for row in timed if row.step is not None and row.step.relative > WIDE]
    if wide:
        which = "all steps" if len(wide) == len(timed) else f"the steps of {', '.join(wide)}"
        said.append(
            f"{which} spread over more than {WIDE:.0%} of their median: seconds say little here, go by the ratios and "
            "their intervals, or run on a quiet machine"
        )
    drift = statistics.median(drift_of(row.seconds) for row in timed)
    if abs(drift - 1) > DRIFTED:
        why = "more --warmup" if drift < 1 else "heat"
        said.append(
            f"the last rounds took {drift:.2f} of the first ones' time: {why}, or others on the machine"
        )
    return said


def _training_notes(row: Figures, plain: Figures, bound: float) -> list[str]:
    """A lever that leaves something out is fast; its loss and gradients tell."""
    parts = []
    for what, ours, theirs in (
        ("loss", row.loss, plain.loss),
        ("gradient norm", row.grad_norm, plain.grad_norm),
    ):
        if ours is None or theirs is None or math.isclose(ours, theirs, rel_tol=bound):
            continue
        parts.append(f"{what} {ours:.5g}, plain {theirs:.5g}")
    if not parts:
        return []
    said = f"{'; '.join(parts)}: another training, unless random numbers or batch statistics are drawn per microbatch"
    return [f"{said}. Run the gates of the technique"]
