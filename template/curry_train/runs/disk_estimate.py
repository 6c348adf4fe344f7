"""What a policy takes on the disk: a checkpoint, all that stay, and what is written before the old one goes.

Bytes for each parameter, with AdamW's two moments: 12 for float32, 14 for bfloat16 with a float32 master copy, 6 for
bfloat16 alone. Proof: `python -m pytest tests/test_disk_estimate.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .policy_config import PolicyConfig

GB = 10**9
LARGE = 10 * GB
WEIGHTS: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "bfloat16-pure": 2}
STATE: Mapping[str, int] = {
    "float32": 12,
    "bfloat16": 14,
    "float16": 14,
    "bfloat16-pure": 6,
}  # weights and the rest


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes. `total` is what stays; `in_flight` is there beside it while a new one is written."""

    parameters: int
    dtype: str
    checkpoint: int
    best: int
    kept: Mapping[str, int]
    total: int
    in_flight: int
    advice: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        """What the volume has to hold."""
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
    """For so many parameters. `state_bytes_per_parameter` is for another optimizer: SGD with momentum takes 8."""
    config = config or PolicyConfig()
    if parameters < 1:
        raise ValueError(f"parameters must be 1 or more, got {parameters}")
    if dtype not in STATE:
        raise ValueError(f"dtype must be one of {', '.join(STATE)}; got {dtype!r}")
    each = STATE[dtype] if state_bytes_per_parameter is None else state_bytes_per_parameter
    if each < WEIGHTS[dtype]:
        raise ValueError(
            f"state_bytes_per_parameter must be {WEIGHTS[dtype]} or more for {dtype}; got {each}"
        )
    checkpoint, best = int(parameters * each), parameters * WEIGHTS[dtype]
    rollback = best if config.rollback_parameters_only else checkpoint
    keep = config.retention
    kept = {
        "rollback": 0 if config.rollback_every is None else keep.rollback_keep * rollback,
        "recovery": keep.recovery_keep * checkpoint,  # one is written at the end in any case
        "best-k": config.best_k * best,
    }
    return DiskEstimate(
        parameters,
        dtype,
        checkpoint,
        best,
        kept,
        sum(kept.values()),
        checkpoint,
        _advice(checkpoint, best, config),
    )


def _advice(checkpoint: int, best: int, config: PolicyConfig) -> tuple[str, ...]:
    said = []
    if every := config.retention.keep_every:
        said.append(
            f"retention.keep_every: {every} keeps one checkpoint more every {every} steps, for good"
        )
    if checkpoint <= LARGE:
        return tuple(said)
    said.append(
        f"a checkpoint takes {checkpoint / GB:.1f} GB, more than {LARGE // GB} GB: save it in the background"
    )
    if config.rollback_every is not None and not config.rollback_parameters_only:
        spared = config.retention.rollback_keep * (checkpoint - best)
        said.append(
            f"rollback_parameters_only: true takes {best / GB:.1f} GB for a rollback and spares {spared / GB:.0f} GB "
            f"in all; a run then resumes from recoveries alone, and after a rollback the optimizer begins anew"
        )
    return tuple(said)
