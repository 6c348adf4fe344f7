"""Strategy of the technique `memory-budget`: the compiler chooses what to recompute.

Proof: `python -m pytest tests/test_memory_budget_gates.py`.
"""

from typing import Any

from torch import nn

from ..core.compiled import CompileFailed
from .strategy import Sample, Strategy

SHARE = 0.5  # of the bytes that compiled code saves for backward


def _memory_budget(model: nn.Module, sample: Sample) -> list[str]:
    # Imported here because this imports the compiler, which takes seconds.
    from ..primitives.memory_budget import memory_budget

    cuda = any(parameter.device.type == "cuda" for parameter in model.parameters())
    options: dict[str, Any] = {
        "blocks": sample.blocks,
        "backend": "inductor" if cuda else "aot_eager",
    }
    if sample.batch is not None:
        options |= {"batch": sample.batch, "loss": sample.loss}
    try:
        return memory_budget(model, SHARE, **options)
    except CompileFailed as failure:
        raise ValueError(str(failure)) from failure


FOUND = (
    Strategy(
        "memory_budget", "compiled, half of the saved bytes (aot_eager on CPU)", _memory_budget
    ),
)
