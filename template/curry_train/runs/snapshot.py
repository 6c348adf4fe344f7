"""Types that a training state and the store exchange: snapshots, contents and load reports.

Proof: `python -m pytest tests/test_state.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .safe_reader import TensorFacts

# The prefix of the model's own tensors; a best-K holds only these.
MODEL = "model."


@dataclass(frozen=True)
class Snapshot:
    """A training state at one moment."""

    # The live tensors. A name that exists on several ranks holds equal values or shards.
    tensors: Mapping[str, Tensor]
    # JSON of the first rank.
    values: Mapping[str, Any] = field(default_factory=dict)
    # JSON of each rank.
    rank_values: Mapping[str, Any] = field(default_factory=dict)
    # The further names of a tensor, each with its first name.
    ties: Mapping[str, str] = field(default_factory=dict)
    # Only these change the tensors: a copy in the background has to end before their next step.
    optimizers: Sequence[Any] = ()


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, without the values of its tensors."""

    tensors: Mapping[str, TensorFacts]
    values: Mapping[str, Any]
    rank_values: Sequence[Mapping[str, Any]] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    # True for a best-K.
    model_only: bool = False


@dataclass
class LoadReport:
    """The result of a load: how many tensors matched, and how the state differs from the save."""

    matched: int = 0
    # The number of tensors that are saved, or are in the state.
    wanted: int = 0
    # Names that the checkpoint lacks.
    missing: list[str] = field(default_factory=list)
    # Names that only the checkpoint has.
    extra: list[str] = field(default_factory=list)
    # Differences in shape, dtype, ties or optimizer.
    different: list[str] = field(default_factory=list)
    # Differences that do not prevent a load.
    notes: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.matched / self.wanted if self.wanted else 1.0

    @property
    def exact(self) -> bool:
        return not (self.missing or self.extra or self.different)


@dataclass(frozen=True)
class Loading:
    """A load that passed its checks: fill `targets`, then call `finish`."""

    targets: Mapping[str, Tensor]
    finish: Callable[[], None]
    report: LoadReport


class State(Protocol):
    """The interface of a state that the store saves and loads."""

    def snapshot(self) -> Snapshot: ...

    def begin_load(self, contents: Contents, *, strict: bool = True) -> Loading: ...
