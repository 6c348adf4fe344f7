"""Row of the savings benchmark: the figures of one strategy on one case.

Table, plot and JSON are made from these rows.

Proof: `python -m pytest tests/test_savings.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PLAIN = "none"
MEASURED = "measured"
REFUSED = "refused"
FAILED = "failed"
TOO_LARGE = "out of memory"


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one strategy's steps, and their ratios to the plain step of the same round."""

    median: float
    fastest: float
    slowest: float
    # Median ratio and its quartiles.
    ratio: float | None
    ratio_lower: float | None
    ratio_upper: float | None


@dataclass
class Row:
    """Figures of one strategy on one case; a figure that was not measured is None.

    Ratios are to the strategy `none`.
    """

    workload: str
    strategy: str
    batch_size: int
    depth: int | None
    # One of measured, refused, failed and out of memory; `why` gives the reason.
    outcome: str = MEASURED
    why: str = ""
    # Names of the modules that the strategy changed.
    modules: list[str] = field(default_factory=list)
    held_bytes: int | None = None
    peak_bytes: int | None = None
    held_ratio: float | None = None
    # Ratio of the bytes held by the blocks alone.
    blocks_held_ratio: float | None = None
    peak_ratio: float | None = None
    forward_flops: int | None = None
    recompute_flops: int | None = None
    # Ratio to the FLOPs of one forward.
    recompute_ratio: float | None = None
    seconds: StepSeconds | None = None
    largest_batch: int | None = None
    parity: str = ""
    worst_error: float | None = None
    # Python calls of a step of one sample.
    python_calls: int | None = None
    # Further figures that only this strategy has.
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def is_wrong(self) -> bool:
        """Whether the strategy failed or changed the training."""
        return self.outcome == FAILED or self.parity.startswith("differs")

    @property
    def label(self) -> str:
        """Description of the case: workload, depth and batch size."""
        depth = f", depth {self.depth}" if self.depth else ""
        return f"{self.workload}{depth}, batch size {self.batch_size}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Row":
        """Restore a row from the result of `to_json`."""
        seconds = data.get("seconds")
        return cls(**{**data, "seconds": None if seconds is None else StepSeconds(**seconds)})
