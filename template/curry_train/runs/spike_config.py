"""The `spike:` block of a configuration: what a loss spike is, and the reaction to it.

    spike: {action: rollback, window: 64, threshold: 6.0, patience: 3, attempts: 3}

Proof: `python -m pytest tests/test_spike.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .setting_checks import is_number, is_whole, require

# The number of losses whose median is the baseline.
LEVEL = 16
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
        return max(LEVEL, self.window // 2)

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
