"""Models whose figures are recorded, and that are too large or too slow for a first try."""

from dataclasses import replace

from curry_train.workloads import Workload
from curry_train.workloads.models import snn, transformer


def llama_8b(*, depth: int = 32, length: int = 4096) -> Workload:
    """Build a workload with the shapes of Llama 3 8B, for planning; it fits no laptop."""
    return transformer(
        depth=depth, dim=4096, heads=32, kv_heads=8, vocabulary=128256, length=length, hidden=14336
    )


def snn_long() -> Workload:
    """Build the spiking network over 1,000 timesteps, where activations dominate memory."""
    return replace(snn(timesteps=1000), name="snn_long")
