"""Settings of the checkpoint and spike blocks, checked when they are made.

checkpoint: {rollback_every: 100, recovery_every: 1000, best_k: 3, best_k_metric: dev_loss,
                 best_k_direction: minimize, retention: {rollback_keep: 5, recovery_keep: 3}}

Proof: `python -m pytest tests/runs/test_policy_config.py tests/runs/test_spike.py`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from ..core.wording import nearest

ConfigT = TypeVar("ConfigT", bound="Retention | PolicyConfig | SpikeConfig")

# Checks of configuration values, with errors that name the key.

# What is accepted, as a test and in words for the error.
Rule = tuple[Callable[[Any], bool], str]


def is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole_from(least: int, more: str = "") -> Rule:
    return lambda value: is_whole(value, least), f"a whole number from {least}{more}"


def one_of(*values: str) -> Rule:
    words = f"{', '.join(values[:-1])} or {values[-1]}"
    return lambda value: value in values, words


def or_none(rule: Rule, words: str) -> Rule:
    accepts, _ = rule
    return lambda value: value is None or accepts(value), words


def require(held: bool, key: str, value: Any, wanted: str) -> None:
    """Raise ValueError `{key} must be {wanted}; got {value}` unless `held`."""
    if not held:
        raise ValueError(f"{key} must be {wanted}; got {value!r}")


def check_fields(config: Any, rules: Mapping[str, Rule]) -> None:
    """Raise ValueError for the first field that its rule does not accept."""
    for name, (accepts, words) in rules.items():
        value = getattr(config, name)
        require(accepts(value), name, value, words)


def _from_block(kind: type[ConfigT], block: Mapping[str, Any], where: str) -> ConfigT:
    """Build settings from a block of a configuration; errors name the whole path of a key."""
    names = [one.name for one in fields(kind)]
    for key in block:
        if key not in names:
            closest = nearest(str(key), names)
            hint = f"there are {', '.join(names)}"
            if closest:
                hint = f"did you mean {where}.{closest}?"
            raise ValueError(f"{where}.{key} is no key; {hint}")
    try:
        return kind(**block)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error


# The `checkpoint:` block of a configuration: how often to save, and how many to keep.

AUTO_INTERVAL = "auto"
METRIC_DIRECTIONS = ("minimize", "maximize")
_METRIC_PATTERN = re.compile(r"[A-Za-z]\w*")


RETENTION_RULES = {
    "rollback_keep": whole_from(1),
    "recovery_keep": whole_from(1),
    "keep_every": or_none(whole_from(1), "1 or more, or null for none"),
}


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
        check_fields(self, RETENTION_RULES)


POLICY_RULES: dict[str, Rule] = {
    "rollback_every": (
        lambda value: value in (None, AUTO_INTERVAL) or is_whole(value, 1),
        f"1 or more, {AUTO_INTERVAL}, or null for never",
    ),
    "recovery_every": or_none(whole_from(1), "1 or more, or null for only at the end"),
    "best_k": whole_from(0, ", 0 for none"),
    "best_k_metric": (
        lambda value: isinstance(value, str) and _METRIC_PATTERN.fullmatch(value) is not None,
        "letters, digits and _, such as dev_loss",
    ),
    "best_k_direction": one_of(*METRIC_DIRECTIONS),
    "retention": (
        lambda value: isinstance(value, Retention),
        "a block such as {rollback_keep: 5, recovery_keep: 3}",
    ),
    "overhead": (lambda value: is_number(value) and 0 < value <= 1, "above 0, at most 1"),
    "mean_hours_between_failures": (
        lambda value: value is None or (is_number(value) and value > 0),
        "above 0, or null",
    ),
}


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

    def __post_init__(self) -> None:
        check_fields(self, POLICY_RULES)

    @property
    def minimize(self) -> bool:
        return self.best_k_direction == "minimize"

    @classmethod
    def from_config(cls, block: Mapping[str, Any]) -> "PolicyConfig":
        """Build the settings from a mapping, such as a block of a YAML file.

        An unknown key raises ValueError with its name.
        """
        if isinstance(block.get("retention"), Mapping):
            retention = _from_block(Retention, block["retention"], "checkpoint.retention")
            block = {**block, "retention": retention}
        return _from_block(cls, block, "checkpoint")


# The `spike:` block of a configuration: what a loss spike is, and the reaction to it.

# The number of losses whose median is the baseline.
NUM_BASELINE_LOSSES = 16
Action = Literal["none", "warn", "rollback"]


SPIKE_RULES: dict[str, Rule] = {
    "action": one_of(*get_args(Action)),
    "window": whole_from(16),
    "threshold": (lambda value: is_number(value) and value > 0, "above 0"),
    "least_rise": (lambda value: is_number(value) and 0 <= value < 1, "from 0 to below 1"),
    "patience": whole_from(1),
    "attempts": whole_from(1),
    "lower_rate_steps": whole_from(1),
    "skip_around": whole_from(0),
    "lower_rate": (
        lambda value: value is None or (is_number(value) and 0 < value < 1),
        "between 0 and 1, or null",
    ),
}


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
        check_fields(self, SPIKE_RULES)

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
        return _from_block(cls, block, "spike")
