"""What a way to use less memory is to the commands: a name, a line about it, and a function that changes a model.

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Sample:
    """What a strategy may measure before it chooses."""

    batch: Any
    loss: Loss
    blocks: str | Sequence[str] | None = None


Apply = Callable[[nn.Module, Sample], list[str]]


@dataclass(frozen=True)
class Strategy:
    """`apply` changes a model in place and returns the names of the modules that it changed.

    `facts` are figures of its own, such as bytes moved, of a model that it changed and that has run a step since.
    """

    name: str
    summary: str
    apply: Apply
    facts: Callable[[nn.Module], dict[str, float]] | None = None
