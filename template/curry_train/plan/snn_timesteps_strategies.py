"""Strategies of the technique `snn-timesteps`: recompute chunks of a loop over time.

Proof: `python -m pytest tests/test_snn_timesteps.py`.
"""

from torch import nn

from ..primitives.snn_timesteps import recompute_timesteps
from .strategy import Sample, Strategy


def _timesteps(model: nn.Module, sample: Sample, *, levels: int = 1) -> list[str]:
    if sample.blocks is not None:
        raise ValueError(
            f"timesteps are recomputed for the whole loop, not for single blocks, "
            f"got blocks {sample.blocks!r}: leave out --blocks"
        )
    return recompute_timesteps(model, levels=levels)


def _nested(model: nn.Module, sample: Sample) -> list[str]:
    return _timesteps(model, sample, levels=2)


FOUND = (
    Strategy("timesteps", "recompute a loop over time in chunks", _timesteps),
    Strategy("timesteps_nested", "the same with chunks inside larger chunks", _nested),
)
