"""Read settings from mappings, with checked keys and types; the checkpoint and spike blocks.

    checkpoint: {rollback_every: 100, recovery_every: 1000, best_k: 3, best_k_metric: dev_loss,
                 best_k_direction: minimize, retention: {rollback_keep: 5, recovery_keep: 3}}

Proof: `python -m pytest tests/trainer/test_config.py`.
"""

import contextlib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from ..core.wording import did_you_mean

# Read nested mappings into a tree of dataclasses, with checked keys and types.

Tree = TypeVar("Tree")
TYPE_DESCRIPTIONS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list",
    dict: "a block of keys",
    type(None): "null",
}
# YAML reads 3e-4 as text.
ACCEPTED_TYPES: dict[Any, Any] = {float: (int, float, str), tuple: (list, tuple), dict: Mapping}


def read_fields(tree: type[Tree], values: Tree | Mapping[str, Any], *, inside: str = "") -> Tree:
    """Build a `tree` from `values`, which runs its own checks.

    `inside` is the key that holds the values, for error messages.
    """
    if isinstance(values, tree):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{inside or 'the configuration'} must be a block of keys, got {values!r}")
    hints = typing.get_type_hints(tree)
    found = {}
    for key, value in values.items():
        path = _join_path(inside, key)
        if key not in hints:
            raise ValueError(f"{path} is no key; {did_you_mean(str(key), flat_keys(tree))}")
        found[key] = _read(hints[key], value, path)
    try:
        return tree(**found)
    except ValueError as error:
        raise ValueError(f"{inside}.{error}" if inside else str(error)) from error


def flat_keys(tree: type, *, inside: str = "") -> list[str]:
    """Return every key of a tree in its dotted form, such as `optimizer.beta1`."""
    keys = []
    for name, kind in typing.get_type_hints(tree).items():
        path = _join_path(inside, name)
        if is_dataclass(kind) and isinstance(kind, type):
            keys += flat_keys(kind, inside=path)
        else:
            keys.append(path)
    return keys


def _read(kind: Any, value: Any, path: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return read_fields(kind, value, inside=path)
    for choice in _list_choices(kind):
        with contextlib.suppress(ValueError):
            return _convert(choice, value)
    raise ValueError(f"{path} must be {_describe_accepted(kind)}; got {value!r}")


def _list_choices(kind: Any) -> tuple[Any, ...]:
    is_union = get_origin(kind) in (types.UnionType, typing.Union)
    return get_args(kind) if is_union else (kind,)


def _convert(kind: Any, value: Any) -> Any:
    """Return a value as one of this kind; raise ValueError if it is not."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        fits = value in get_args(kind)
    else:
        fits = isinstance(value, ACCEPTED_TYPES.get(origin, origin))
        fits &= origin is bool or not isinstance(value, bool)
    if not fits:
        raise ValueError(value)
    if origin is float:
        return float(value)
    if origin is tuple:
        return tuple(_convert(get_args(kind)[0], item) for item in value)
    return value


def _describe_accepted(kind: Any) -> str:
    """Describe the accepted values in words."""
    words: list[str] = []
    for choice in _list_choices(kind):
        origin = get_origin(choice) or choice
        words += get_args(choice) if origin is Literal else [TYPE_DESCRIPTIONS[origin]]
    return " or ".join(words)


def _join_path(inside: str, key: object) -> str:
    return f"{inside}.{key}" if inside else str(key)


def require(held: bool, key: str, value: Any, wanted: str) -> None:
    """Raise ValueError `{key} must be {wanted}; got {value}` unless `held`."""
    if not held:
        raise ValueError(f"{key} must be {wanted}; got {value!r}")


def require_least(settings: Any, least: int, *names: str) -> None:
    """Raise ValueError for the first of these fields that is a number below `least`."""
    hints = typing.get_type_hints(type(settings))
    for name in names:
        value = getattr(settings, name)
        fits = value is None or isinstance(value, str) or value >= least
        otherwise = ", or null for none" if type(None) in _list_choices(hints[name]) else ""
        require(fits, name, value, f"{least} or more{otherwise}")


# The `checkpoint:` block of a configuration: how often to save, and how many to keep.

AUTO_INTERVAL = "auto"
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
        require_least(self, 1, "rollback_keep", "recovery_keep", "keep_every")


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of what to save, how often, and which checkpoints to keep.

    A best-K holds parameters only, and is saved when `best_k_metric` is measured and is among the
    best.
    """

    # Steps between rollbacks. `auto` saves as often as `overhead` allows.
    rollback_every: int | Literal["auto"] | None = 100
    # Steps between recoveries; None saves one at the end only.
    recovery_every: int | None = 1000
    best_k: int = 3
    best_k_metric: str = "dev_loss"
    best_k_direction: Literal["minimize", "maximize"] = "minimize"
    retention: Retention = Retention()
    # For `rollback_every: auto`: the time of all saves as a fraction of the time of the steps.
    overhead: float = 0.035

    def __post_init__(self) -> None:
        require_least(self, 1, "rollback_every", "recovery_every")
        require_least(self, 0, "best_k")
        fits = _METRIC_PATTERN.fullmatch(self.best_k_metric) is not None
        wanted = "letters, digits and _, such as dev_loss"
        require(fits, "best_k_metric", self.best_k_metric, wanted)
        require(0 < self.overhead <= 1, "overhead", self.overhead, "above 0, at most 1")


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

    def __post_init__(self) -> None:
        require_least(self, 16, "window")
        require_least(self, 1, "patience", "attempts")
        require_least(self, 0, "skip_around")
        require(0 < self.threshold < float("inf"), "threshold", self.threshold, "above 0")
        require(0 <= self.least_rise < 1, "least_rise", self.least_rise, "from 0 to below 1")

    @property
    def judges_after(self) -> int:
        """The number of losses that are accepted before losses are compared with a limit."""
        return max(NUM_BASELINE_LOSSES, self.window // 2)

    @property
    def rolls_back(self) -> bool:
        return self.action == "rollback"


# The `box:` block of a configuration: bad steps that are kept to be repeated.


@dataclass(frozen=True)
class BoxConfig:
    """How many bad steps are kept, each with the state from before it.

    A box takes no further space for its state until retention deletes the checkpoint.
    """

    # The newest boxes of a run are kept; 0 keeps none.
    keep: int = 2
    # The most bytes of all boxes of a run.
    most_bytes: int = 100 * 10**9

    def __post_init__(self) -> None:
        require_least(self, 0, "keep", "most_bytes")
