"""Estimate the disk space that a checkpoint policy needs.

Bytes per parameter, with AdamW's two moments: 12 for float32, 14 for bfloat16 with a float32 master
copy, 6 for bfloat16 alone.
Proof: `python -m pytest tests/test_disk_estimate.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .policy_config import PolicyConfig

GB = 10**9
LARGE = 10 * GB
# Weights alone, in bytes per parameter.
WEIGHTS: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "bfloat16-pure": 2}
# Weights and optimizer state together, in bytes per parameter.
STATE: Mapping[str, int] = {"float32": 12, "bfloat16": 14, "float16": 14, "bfloat16-pure": 6}


@dataclass(frozen=True)
class DiskEstimate:
    """The disk space of a policy, in bytes."""

    # Number of parameters of the model.
    parameters: int
    dtype: str
    # Size of a checkpoint with the optimizer state.
    checkpoint: int
    # Size of a best-K checkpoint, which holds the weights alone.
    best: int
    # Size of all checkpoints that the policy retains, by kind.
    kept: Mapping[str, int]
    # Sum of `kept`.
    total: int
    # Size of the new checkpoint that is written before an old one is deleted.
    in_flight: int
    advice: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        """The highest use of the volume at any moment."""
        return self.total + self.in_flight

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"most": self.most}


def estimate_disk(
    parameters: int,
    config: PolicyConfig | None = None,
    *,
    dtype: str = "float32",
    state_bytes_per_parameter: float | None = None,
) -> DiskEstimate:
    """Estimate the disk space for a model with this number of parameters.

    `state_bytes_per_parameter` is for an optimizer other than AdamW: SGD with momentum takes 8.
    """
    config = config or PolicyConfig()
    if parameters < 1:
        raise ValueError(f"parameters must be 1 or more, got {parameters}")
    if dtype not in STATE:
        raise ValueError(f"dtype must be one of {', '.join(STATE)}; got {dtype!r}")
    state_bytes = STATE[dtype] if state_bytes_per_parameter is None else state_bytes_per_parameter
    if state_bytes < WEIGHTS[dtype]:
        raise ValueError(
            f"state_bytes_per_parameter must be {WEIGHTS[dtype]} or more for {dtype}; "
            f"got {state_bytes}"
        )

    checkpoint = int(parameters * state_bytes)
    best = parameters * WEIGHTS[dtype]
    rollback = best if config.rollback_parameters_only else checkpoint
    retention = config.retention
    kept = {
        "rollback": 0 if config.rollback_every is None else retention.rollback_keep * rollback,
        # A recovery is written at the end of a run, even without `recovery_every`.
        "recovery": retention.recovery_keep * checkpoint,
        "best-k": config.best_k * best,
    }
    return DiskEstimate(
        parameters,
        dtype,
        checkpoint,
        best,
        kept,
        total=sum(kept.values()),
        in_flight=checkpoint,
        advice=_advice(checkpoint, best, config),
    )


def _advice(checkpoint: int, best: int, config: PolicyConfig) -> tuple[str, ...]:
    advice = []
    if every := config.retention.keep_every:
        advice.append(
            f"retention.keep_every: {every} keeps one checkpoint every {every} steps forever, "
            f"in addition to this estimate"
        )
    if checkpoint <= LARGE:
        return tuple(advice)

    advice.append(
        f"a checkpoint takes {checkpoint / GB:.1f} GB, more than {LARGE // GB} GB: "
        f"save it in the background"
    )
    if config.rollback_every is not None and not config.rollback_parameters_only:
        saved_bytes = config.retention.rollback_keep * (checkpoint - best)
        advice.append(
            f"rollback_parameters_only: true takes {best / GB:.1f} GB for a rollback and saves "
            f"{saved_bytes / GB:.0f} GB in total; the run can then resume from recoveries only, "
            f"and after a rollback the optimizer starts with fresh state"
        )
    return tuple(advice)
