"""Every way to use less memory that this project has, by name; registered here once, it appears in every command.

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..primitives.checkpoint_config import CheckpointConfig
from ..primitives.recompute import recompute_blocks
from .profiler import MemoryProfiler
from .selective import SelectiveCheckpointer

Loss = Callable[[nn.Module, Any], Tensor]
SELECTIVE_SHARE = 0.6  # of the held bytes, as the example that the commands show; a user sets a threshold or a budget


@dataclass(frozen=True)
class Sample:
    """What a strategy may measure before it chooses."""

    batch: Any
    loss: Loss
    blocks: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Strategy:
    """`apply` changes a model in place and returns the names of the modules that it changed."""

    name: str
    summary: str
    apply: Callable[[nn.Module, Sample], list[str]]


def _none(model: nn.Module, sample: Sample) -> list[str]:
    return []


def _full(model: nn.Module, sample: Sample) -> list[str]:
    return recompute_blocks(model, blocks=sample.blocks)


def _sequential(model: nn.Module, sample: Sample) -> list[str]:
    patterns = [sample.blocks] if isinstance(sample.blocks, str) else list(sample.blocks or [])
    config = CheckpointConfig(enabled=True, strategy="sequential", include_patterns=tuple(patterns))
    checkpointer = SelectiveCheckpointer(config)
    checkpointer.apply(model, batch=sample.batch, loss=sample.loss)
    return checkpointer.get_checkpointed_layers()


def _selective(model: nn.Module, sample: Sample) -> list[str]:
    report = MemoryProfiler(model).profile(sample.batch, 1, loss=sample.loss, blocks=sample.blocks)
    savings = sum(max(0, layer.bytes - layer.boundary_bytes) for layer in report.layers)
    target = max(SELECTIVE_SHARE * report.held_bytes, report.held_bytes - savings)
    names = report.recommend_layers((target + 1) / 2**20) if savings else []
    return recompute_blocks(model, blocks=names) if names else []


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("none", "keep every activation", _none),
        Strategy("full", "recompute every block", _full),
        Strategy("sequential", "recompute runs of blocks, the count with the lowest peak", _sequential),
        Strategy("selective", "recompute the largest blocks until 60% of the bytes are held", _selective),
    )
}
