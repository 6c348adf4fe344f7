"""The block `checkpoint:` of a configuration: how often which state is saved, and how many of them stay.

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
    """How many stay, the newest. A recovery counts as a rollback too: its bytes are there already. What is saved at a
    multiple of `keep_every` stays for good."""

    rollback_keep: int = 5
    recovery_keep: int = 3
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("rollback_keep", "recovery_keep"):
            require(
                is_whole(getattr(self, name), 1), name, getattr(self, name), "a whole number from 1"
            )
        every = self.keep_every
        require(
            every is None or is_whole(every, 1), "keep_every", every, "1 or more, or null for none"
        )


@dataclass(frozen=True)
class PolicyConfig:
    """`rollback_every: auto` saves as often as `overhead` allows: the seconds of all saves, as a part of those of the
    steps. With `mean_hours_between_failures` not more often than loses the least time (Young and Daly).

    A best-K holds parameters only, and is written when `best_k_metric` is measured and among the best. With
    `rollback_parameters_only` a rollback does so as well: a run then resumes from recoveries alone.
    """

    rollback_every: int | str | None = 100
    recovery_every: int | None = 1000
    best_k: int = 3
    best_k_metric: str = "dev_loss"
    best_k_direction: str = "minimize"
    retention: Retention = field(default_factory=Retention)
    overhead: float = 0.035
    mean_hours_between_failures: float | None = None
    rollback_parameters_only: bool = False

    def __post_init__(self) -> None:
        every = self.rollback_every
        known = every in (None, AUTO) or is_whole(every, 1)
        require(known, "rollback_every", every, f"1 or more, {AUTO}, or null for never")
        every = self.recovery_every
        require(
            every is None or is_whole(every, 1),
            "recovery_every",
            every,
            "1 or more, or null for the end alone",
        )
        require(
            is_whole(self.best_k, 0), "best_k", self.best_k, "a whole number from 0, 0 for none"
        )
        named = (
            isinstance(self.best_k_metric, str) and _NAME.fullmatch(self.best_k_metric) is not None
        )
        require(
            named, "best_k_metric", self.best_k_metric, "letters, digits and _, such as dev_loss"
        )
        require(
            self.best_k_metric != "rollback",
            "best_k_metric",
            "rollback",
            "another name: this one is taken",
        )
        known = self.best_k_direction in DIRECTIONS
        require(known, "best_k_direction", self.best_k_direction, " or ".join(DIRECTIONS))
        kept = isinstance(self.retention, Retention)
        require(
            kept,
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
        only = self.rollback_parameters_only
        require(isinstance(only, bool), "rollback_parameters_only", only, "true or false")

    @property
    def minimize(self) -> bool:
        return self.best_k_direction == "minimize"

    @classmethod
    def from_config(cls, block: Mapping[str, Any]) -> "PolicyConfig":
        """From a mapping, such as the block of a YAML file. A key that is not known is an error that names it."""
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
    names = [each.name for each in fields(kind)]
    for key in block:
        if key not in names:
            meant = nearest(str(key), names)
            told = f"did you mean {where}.{meant}?" if meant else f"there are {', '.join(names)}"
            raise ValueError(f"{where}.{key} is no key; {told}")
    return dict(block)


def _under(where: str, error: ValueError) -> str:
    said = str(error)
    return said if said.startswith("checkpoint.") else f"{where}.{said}"
