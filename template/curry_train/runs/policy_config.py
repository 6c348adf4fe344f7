"""The `checkpoint:` block of a configuration: how often to save, and how many to keep.

    checkpoint: {rollback_every: 100, recovery_every: 1000, best_k: 3, best_k_metric: dev_loss,
                 best_k_direction: minimize, retention: {rollback_keep: 5, recovery_keep: 3}}

Proof: `python -m pytest tests/test_policy_config.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..core.nearest import nearest
from .setting_checks import is_number, is_whole, require

AUTO = "auto"
DIRECTIONS = ("minimize", "maximize")
_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True)
class Retention:
    """How many checkpoints of each kind to keep.

    A recovery counts as a rollback too, because it holds the same state.
    """

    # The number of newest rollbacks to keep.
    rollback_keep: int = 5
    # The number of newest recoveries to keep.
    recovery_keep: int = 3
    # States saved at a multiple of this step are never deleted.
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("rollback_keep", "recovery_keep"):
            count = getattr(self, name)
            require(is_whole(count, 1), name, count, "a whole number from 1")
        every = self.keep_every
        require(
            every is None or is_whole(every, 1), "keep_every", every, "1 or more, or null for none"
        )


@dataclass(frozen=True)
class PolicyConfig:
    """How often to save which state, and which checkpoints to keep.

    A best-K holds parameters only, and is saved when `best_k_metric` is measured and is among the
    best.
    """

    # Steps between rollbacks. `auto` saves as often as `overhead` allows.
    rollback_every: int | str | None = 100
    # Steps between recoveries; None saves one at the end only.
    recovery_every: int | None = 1000
    best_k: int = 3
    best_k_metric: str = "dev_loss"
    best_k_direction: str = "minimize"
    retention: Retention = field(default_factory=Retention)
    # For `rollback_every: auto`: the time of all saves as a fraction of the time of the steps.
    overhead: float = 0.035
    # For `rollback_every: auto`: save no more often than loses the least time (Young and Daly).
    mean_hours_between_failures: float | None = None
    # Rollbacks hold parameters only; a run then resumes from recoveries only.
    rollback_parameters_only: bool = False

    def __post_init__(self) -> None:
        self._require_valid_cadence()
        self._require_valid_best_k()
        require(
            isinstance(self.retention, Retention),
            "retention",
            self.retention,
            "a block such as {rollback_keep: 5, recovery_keep: 3}",
        )
        require(
            is_number(self.overhead) and 0 < self.overhead <= 1,
            "overhead",
            self.overhead,
            "above 0, at most 1",
        )
        hours = self.mean_hours_between_failures
        require(
            hours is None or (is_number(hours) and hours > 0),
            "mean_hours_between_failures",
            hours,
            "above 0, or null",
        )
        parameters_only = self.rollback_parameters_only
        require(
            isinstance(parameters_only, bool),
            "rollback_parameters_only",
            parameters_only,
            "true or false",
        )

    def _require_valid_cadence(self) -> None:
        rollback_every = self.rollback_every
        require(
            rollback_every in (None, AUTO) or is_whole(rollback_every, 1),
            "rollback_every",
            rollback_every,
            f"1 or more, {AUTO}, or null for never",
        )
        recovery_every = self.recovery_every
        require(
            recovery_every is None or is_whole(recovery_every, 1),
            "recovery_every",
            recovery_every,
            "1 or more, or null for only at the end",
        )

    def _require_valid_best_k(self) -> None:
        require(
            is_whole(self.best_k, 0), "best_k", self.best_k, "a whole number from 0, 0 for none"
        )
        metric = self.best_k_metric
        require(
            isinstance(metric, str) and _NAME.fullmatch(metric) is not None,
            "best_k_metric",
            metric,
            "letters, digits and _, such as dev_loss",
        )
        require(metric != "rollback", "best_k_metric", metric, "another name: this one is taken")
        direction = self.best_k_direction
        require(direction in DIRECTIONS, "best_k_direction", direction, " or ".join(DIRECTIONS))

    @property
    def minimize(self) -> bool:
        return self.best_k_direction == "minimize"

    @classmethod
    def from_config(cls, block: Mapping[str, Any]) -> "PolicyConfig":
        """Build the settings from a mapping, such as a block of a YAML file.

        An unknown key raises ValueError with its name.
        """
        values = _known(cls, block, "checkpoint")
        if isinstance(values.get("retention"), Mapping):
            try:
                values["retention"] = Retention(
                    **_known(Retention, values["retention"], "checkpoint.retention")
                )
            except ValueError as error:
                raise ValueError(_under("checkpoint.retention", error)) from error
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(_under("checkpoint", error)) from error


def _known(kind: type, block: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = [one.name for one in fields(kind)]
    for key in block:
        if key not in names:
            closest = nearest(str(key), names)
            hint = f"there are {', '.join(names)}"
            if closest:
                hint = f"did you mean {where}.{closest}?"
            raise ValueError(f"{where}.{key} is no key; {hint}")
    return dict(block)


def _under(where: str, error: ValueError) -> str:
    message = str(error)
    return message if message.startswith("checkpoint.") else f"{where}.{message}"
