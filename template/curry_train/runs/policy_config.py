"""Settings of the checkpoint and spike blocks, checked when they are made.

checkpoint: {rollback_every: 100, recovery_every: 1000, best_k: 3, best_k_metric: dev_loss,
                 best_k_direction: minimize, retention: {rollback_keep: 5, recovery_keep: 3}}

Proof: `python -m pytest tests/runs/test_policy_config.py tests/runs/test_spike.py`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ..core.wording import nearest

# Checks of configuration values, with errors that name the key.


def is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require(held: bool, key: str, value: Any, wanted: str) -> None:
    """Raise ValueError `{key} must be {wanted}; got {value}` unless `held`."""
    if not held:
        raise ValueError(f"{key} must be {wanted}; got {value!r}")


# The `checkpoint:` block of a configuration: how often to save, and how many to keep.

AUTO_INTERVAL = "auto"
METRIC_DIRECTIONS = ("minimize", "maximize")
_METRIC_PATTERN = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True)
class Retention:
    """Number of checkpoints of each kind to keep.

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
    """Settings of what to save, how often, and which checkpoints to keep.

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
            rollback_every in (None, AUTO_INTERVAL) or is_whole(rollback_every, 1),
            "rollback_every",
            rollback_every,
            f"1 or more, {AUTO_INTERVAL}, or null for never",
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
            isinstance(metric, str) and _METRIC_PATTERN.fullmatch(metric) is not None,
            "best_k_metric",
            metric,
            "letters, digits and _, such as dev_loss",
        )
        require(metric != "rollback", "best_k_metric", metric, "another name: this one is taken")
        direction = self.best_k_direction
        require(
            direction in METRIC_DIRECTIONS,
            "best_k_direction",
            direction,
            " or ".join(METRIC_DIRECTIONS),
        )

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


# The `spike:` block of a configuration: what a loss spike is, and the reaction to it.

# The number of losses whose median is the baseline.
NUM_BASELINE_LOSSES = 16
Action = Literal["none", "warn", "rollback"]


@dataclass(frozen=True)
class SpikeConfig:
    """When a loss is a spike, and what happens then.

    A loss is too high if it is above the baseline, the median of the last accepted losses, by both
    `threshold` and `least_rise`. Losses that are too high in `patience` steps in a row are a spike.
    """

    # `rollback` loads the newest state from before the spike, and trains on without its samples.
    action: Action = "warn"
    # The number of accepted losses from which the noise is measured.
    window: int = 64
    # Robust standard deviations of the noise above the baseline.
    threshold: float = 6.0
    # A fraction of the baseline, or of the fall of the loss since the run began if that is less.
    least_rise: float = 0.02
    patience: int = 3
    # The number of rollbacks at one place before training stops.
    attempts: int = 3
    # Steps before and after the spike that are skipped too; each further attempt doubles them.
    skip_around: int = 8
    # The factor on the learning rate for `lower_rate_steps` steps after a rollback, such as 0.5.
    lower_rate: float | None = None
    lower_rate_steps: int = 100

    def __post_init__(self) -> None:
        require(self.action in get_args(Action), "action", self.action, "none, warn or rollback")
        require(is_whole(self.window, 16), "window", self.window, "a whole number from 16")
        require(
            is_number(self.threshold) and self.threshold > 0, "threshold", self.threshold, "above 0"
        )
        least = self.least_rise
        require(is_number(least) and 0 <= least < 1, "least_rise", least, "from 0 to below 1")
        for name in ("patience", "attempts", "lower_rate_steps"):
            count = getattr(self, name)
            require(is_whole(count, 1), name, count, "a whole number from 1")
        require(
            is_whole(self.skip_around, 0), "skip_around", self.skip_around, "a whole number from 0"
        )
        rate = self.lower_rate
        require(
            rate is None or (is_number(rate) and 0 < rate < 1),
            "lower_rate",
            rate,
            "between 0 and 1, or null",
        )

    @property
    def judges_after(self) -> int:
        """The number of losses that are accepted before losses are compared with a limit."""
        return max(NUM_BASELINE_LOSSES, self.window // 2)

    @property
    def rolls_back(self) -> bool:
        return self.action == "rollback"

    @classmethod
    def from_config(cls, block: Mapping[str, Any]) -> "SpikeConfig":
        """Build the settings from a mapping, such as a block of a YAML file."""
        names = [one.name for one in fields(cls)]
        if unknown := [str(key) for key in block if key not in names]:
            raise ValueError(f"spike.{unknown[0]} is no key; there are {', '.join(names)}")
        try:
            return cls(**block)
        except ValueError as error:
            raise ValueError(f"spike.{error}") from error
