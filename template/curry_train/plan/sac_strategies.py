"""Strategies of the technique `sac`: selective recompute by policy, and regions.

Proof: `python -m pytest tests/test_sac_contract.py`.
"""

from functools import partial

from torch import nn

from ..core.measure import measure_memory
from ..primitives.regions import apply_regions, remove_regions
from ..primitives.sac import apply_sac
from .strategy import Sample, Strategy


def _sac(model: nn.Module, sample: Sample, *, policy: str) -> list[str]:
    return apply_sac(model, policy, blocks=sample.blocks)


def _regions(model: nn.Module, sample: Sample) -> list[str]:
    """Apply regions; undo them and return no names if they free nothing."""
    if sample.batch is None:
        return apply_regions(model, blocks=sample.blocks)
    before = measure_memory(model, sample.batch, sample.loss)
    names = apply_regions(model, blocks=sample.blocks)
    if measure_memory(model, sample.batch, sample.loss).held_bytes < before.held_bytes:
        return names
    remove_regions(model)
    return []


FOUND = (
    Strategy(
        "sac",
        "keep products, attention and convolutions, by operation",
        partial(_sac, policy="save_expensive"),
    ),
    Strategy(
        "sac_matmuls",
        "keep matrix products alone, by operation",
        partial(_sac, policy="save_matmuls"),
    ),
    Strategy(
        "sac_attention",
        "keep attention alone, by operation",
        partial(_sac, policy="save_attention"),
    ),
    Strategy(
        "sac_every_second",
        "keep attention and every second matrix product, by operation",
        partial(_sac, policy="every_second_matmul"),
    ),
    Strategy("regions", "keep products and attention, without a dispatch mode", _regions),
)
