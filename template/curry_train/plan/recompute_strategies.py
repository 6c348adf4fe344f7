"""Strategies of the technique `recompute`: none, full, sequential and selective.

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from torch import nn

from ..primitives.recompute import recompute_blocks
from ..primitives.segments import choose_segments, recompute_segments
from .profiler import MemoryProfiler
from .strategy import Sample, Strategy

# Fraction of the held bytes to keep, for the example in the commands; users set a threshold or a
# budget instead.
SELECTIVE_SHARE = 0.6


def _none(model: nn.Module, sample: Sample) -> list[str]:
    return []


def _full(model: nn.Module, sample: Sample) -> list[str]:
    return recompute_blocks(model, blocks=sample.blocks)


def _sequential(model: nn.Module, sample: Sample) -> list[str]:
    count = choose_segments(model, sample.batch, sample.loss, blocks=sample.blocks)
    return recompute_segments(model, count, blocks=sample.blocks)


def _selective(model: nn.Module, sample: Sample) -> list[str]:
    report = MemoryProfiler(model).profile(sample.batch, 1, loss=sample.loss, blocks=sample.blocks)
    savings = sum(max(0, layer.bytes - layer.boundary_bytes) for layer in report.layers)
    target = max(SELECTIVE_SHARE * report.held_bytes, report.held_bytes - savings)
    names = report.recommend_layers((target + 1) / 2**20) if savings else []
    return recompute_blocks(model, blocks=names) if names else []


FOUND = (
    Strategy("none", "keep every activation", _none),
    Strategy("full", "recompute every block", _full),
    Strategy("sequential", "recompute runs of blocks, the count with the lowest peak", _sequential),
    Strategy(
        "selective", "recompute the largest blocks until 60% of the bytes are held", _selective
    ),
)
