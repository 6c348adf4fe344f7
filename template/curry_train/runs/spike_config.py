"""The block `spike:` of a configuration: what counts as a loss spike, and what is done about one.

    spike: {action: rollback, window: 64, threshold: 6.0, patience: 3, attempts: 3}

Proof: `python -m pytest tests/test_spike.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .setting_checks import is_number, is_whole, require

LEVEL = 16  # losses whose median is the level
Action = Literal["none", "warn", "rollback"]


@dataclass(frozen=True)
class SpikeConfig:
    """A loss is too high when it is above the baseline, the median of the last losses that were not, by `threshold`
    robust standard deviations of the last `window` of them, and by `least_rise` of the baseline, or of what the loss
    has fallen by since the run began where that is less. So many steps in a row, `patience`, are a spike.

    `rollback` goes back to the newest state from before it and trains on without the samples of the spike and of
    `skip_around` steps before and after it, twice as many at each further attempt at one place, of which there are
    `attempts`.
    With `lower_rate`, such as 0.5, the rate is that part of itself for `lower_rate_steps` steps afterwards.
    """

    action: Action = "warn"
    window: int = 64
    threshold: float = 6.0
    least_rise: float = 0.02
    patience: int = 3
    attempts: int = 3
    skip_around: int = 8
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
            require(
                is_whole(getattr(self, name), 1), name, getattr(self, name), "a whole number from 1"
            )
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
        """Losses that are taken as they are before the first is judged."""
        return max(LEVEL, self.window // 2)

    @property
    def rolls_back(self) -> bool:
        return self.action == "rollback"

    @classmethod
    def from_config(cls, block: Mapping[str, Any]) -> "SpikeConfig":
        """From a mapping, such as the block of a YAML file."""
        names = [each.name for each in fields(cls)]
        if unknown := [str(key) for key in block if key not in names]:
            raise ValueError(f"spike.{unknown[0]} is no key; there are {', '.join(names)}")
        try:
            return cls(**block)
        except ValueError as error:
            raise ValueError(f"spike.{error}") from error
