"""Timeline: measure the bytes alive through one training step, by owner.

    timeline = measure_timeline(model, batch, loss)
    print(timeline.table())

Proof: `python -m pytest tests/test_timeline.py`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..core.measure import Life
from .report import ACTIVATIONS, ALLOCATOR, GROUPS, Peak, Point, Timeline
from .step_lives import StepLives, record_step

__all__ = ["Peak", "Point", "Timeline", "measure_timeline", "timeline_of"]

Loss = Callable[[nn.Module, Any], Tensor]


def measure_timeline(
    module: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: str | Sequence[str] | None = None,
) -> Timeline:
    """Measure forward, backward and optimizer step, with AdamW if no optimizer is given.

    The model itself runs, with everything that it is wrapped in. Its weights, buffers, gradients
    and mode and every generator are restored, and the optimizer is a copy. A module in eval mode is
    measured in training mode. Layers are those of `MemoryProfiler`.
    """
    lives = record_step(module, batch, loss, optimizer=optimizer, blocks=blocks)
    return timeline_of(lives, type(module).__name__)


def timeline_of(record: StepLives, model: str) -> Timeline:
    """Build the timeline of a recorded step."""
    length = len(record.phases)
    changes = {group: [0] * (length + 1) for group in GROUPS}
    for life in record.lives:
        changes[life.owner[0]][life.born] += life.nbytes
        changes[life.owner[0]][length if life.died is None else life.died] -= life.nbytes

    owners = {group: list(accumulate(change[:length])) for group, change in changes.items()}
    totals = [sum(figures) for figures in zip(*owners.values(), strict=True)]
    if record.cuda:
        owners[ALLOCATOR] = [
            allocated - known for allocated, known in zip(record.allocated, totals, strict=True)
        ]
        totals = record.allocated
    else:
        del owners[ALLOCATOR]

    highest = totals.index(max(totals))
    at_peak = {group: figures[highest] for group, figures in owners.items()}
    shown = [
        index
        for index, total in enumerate(totals)
        if index == 0 or total != totals[index - 1] or index in record.ends.values()
    ]
    return Timeline(
        model=model,
        optimizer=record.optimizer,
        device=str(record.cuda or "cpu"),
        num_operations=length,
        points=tuple(Point(index, record.phases[index], totals[index]) for index in shown),
        owners={group: _figures_at(figures, shown) for group, figures in owners.items()},
        after={phase: totals[index] for phase, index in record.ends.items()},
        peak=_peak(record, highest, at_peak),
    )


def _figures_at(figures: Sequence[int], indices: Sequence[int]) -> tuple[int, ...]:
    return tuple(figures[index] for index in indices)


def _peak(record: StepLives, index: int, owners: dict[str, int]) -> Peak:
    """Build the peak; on CUDA, add what an operation allocated and freed again while it ran."""
    if record.cuda:
        within = torch.cuda.max_memory_allocated(record.cuda) - record.before - sum(owners.values())
        owners[ALLOCATOR] += within
    layers: dict[str, int] = {}
    for life in record.lives:
        if life.owner[0] == ACTIVATIONS and _alive(life, index):
            layers[life.owner[1]] = layers.get(life.owner[1], 0) + life.nbytes
    return Peak(sum(owners.values()), record.phases[index], index, owners, layers)


def _alive(life: Life, index: int) -> bool:
    return life.born <= index and (life.died is None or life.died > index)
