"""What passes between a state and the store: tensors by name, JSON beside them, and on the way back where they go.

Proof: `python -m pytest tests/test_state.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .safe_reader import TensorFacts

MODEL = "model."  # names of the model's own tensors begin so; best-K keeps those alone


@dataclass(frozen=True)
class Snapshot:
    """A state at one moment.

    `tensors` are the live ones: a name that several ranks have holds the same on each, or a shard. `values` is the
    first rank's, `rank_values` each rank's own; both are JSON. `ties` says of a tensor's second name which is its
    first. Only `optimizers` change the tensors: whoever copies in the background has until their next step.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    rank_values: Mapping[str, Any] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    optimizers: Sequence[Any] = ()


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, read before anything is changed; `model_only` for a best-K."""

    tensors: Mapping[str, TensorFacts]
    values: Mapping[str, Any]
    rank_values: Sequence[Mapping[str, Any]] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    model_only: bool = False


@dataclass
class LoadReport:
    """What a load did: how many of the tensors were matched, and what is not as it was at the save."""

    matched: int = 0
    wanted: int = 0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.matched / self.wanted if self.wanted else 1.0

    @property
    def exact(self) -> bool:
        return not (self.missing or self.extra or self.different)


@dataclass(frozen=True)
class Loading:
    """A load that fits: fill `targets`, then call `finish`."""

    targets: Mapping[str, Tensor]
    finish: Callable[[], None]
    report: LoadReport


class State(Protocol):
    """What the store saves and loads."""

    def snapshot(self) -> Snapshot: ...

    def begin_load(self, contents: Contents, *, strict: bool = True) -> Loading: ...
