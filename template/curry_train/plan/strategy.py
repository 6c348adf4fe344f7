"""Strategy: a named way to use less memory, with a function that applies it to a model.

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Sample:
    """Inputs that a strategy may use to measure a model before it chooses."""

    batch: Any
    loss: Loss
    blocks: str | Sequence[str] | None = None  # names or globs; None for the repeated blocks


Apply = Callable[[nn.Module, Sample], list[str]]


@dataclass(frozen=True)
class Strategy:
    """A named way to use less memory."""

    name: str
    summary: str  # one line for the commands

    # Changes a model in place, and returns the names of the modules that it changed.
    apply: Apply

    # Returns extra figures, such as bytes moved, of a changed model that has run a step.
    facts: Callable[[nn.Module], dict[str, float]] | None = None
