"""What was measured of one strategy on one case: a row of the benchmark's table, picture and JSON.

Proof: `python -m pytest tests/test_savings.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PLAIN = "none"
MEASURED, REFUSED, FAILED, TOO_LARGE = "measured", "refused", "failed", "out of memory"


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one strategy's steps, and their ratios to the plain step of the same round with its quartiles."""

    median: float
    fastest: float
    slowest: float
    ratio: float | None
    ratio_lower: float | None
    ratio_upper: float | None


@dataclass
class Row:
    """One strategy on one case. `outcome` is measured, refused, failed or out of memory, and `why` says more; a figure
    that was not measured is None. Ratios are to `none`; `recompute_ratio` is to the FLOPs of one forward,
    `blocks_held_ratio` is of what the blocks alone hold, `python_calls` are those of a step of one sample, and `facts`
    the strategy's own."""

    workload: str
    strategy: str
    batch_size: int
    depth: int | None
    outcome: str = MEASURED
    why: str = ""
    modules: list[str] = field(default_factory=list)
    held_bytes: int | None = None
    peak_bytes: int | None = None
    held_ratio: float | None = None
    blocks_held_ratio: float | None = None
    peak_ratio: float | None = None
    forward_flops: int | None = None
    recompute_flops: int | None = None
    recompute_ratio: float | None = None
    seconds: StepSeconds | None = None
    largest_batch: int | None = None
    parity: str = ""
    worst_error: float | None = None
    python_calls: int | None = None
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def is_wrong(self) -> bool:
        """Whether it would not be the same training."""
        return self.outcome == FAILED or self.parity.startswith("differs")

    @property
    def label(self) -> str:
        """The case that the row is about."""
        depth = f", depth {self.depth}" if self.depth else ""
        return f"{self.workload}{depth}, batch size {self.batch_size}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Row":
        """The row that `to_json` wrote."""
        seconds = data.get("seconds")
        return cls(**{**data, "seconds": None if seconds is None else StepSeconds(**seconds)})
