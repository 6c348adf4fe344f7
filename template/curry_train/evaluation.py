"""Mean loss over dev samples, the same samples for any number of ranks.

Proof: `python -m pytest tests/test_evaluation.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .core.untouched import buffers_kept, generators_kept
from .data.dataset import Dataset


def mean_loss(
    model: nn.Module,
    dataset: Dataset,
    loss: Callable[[nn.Module, Any], Tensor],
    count: Callable[[Any], int],
    *,
    samples: int,
    microbatch: int,
    rank: int = 0,
    ranks: int = 1,
) -> float:
    """Return the mean loss over the first `samples` samples, in eval mode.

    The model and every random generator are left unchanged. A rank without samples left evaluates
    the last sample with no weight, because FSDP2 needs every rank in each forward.
    """
    samples = min(samples, len(dataset))
    sums = torch.zeros(2, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), generators_kept(), buffers_kept(model):
            for start in range(0, samples, microbatch * ranks):
                mine = range(
                    start + rank * microbatch, min(samples, start + (rank + 1) * microbatch)
                )
                batch = dataset.batch(mine or [samples - 1])
                value = loss(model, batch)
                if mine:
                    sums += torch.tensor([value.item(), count(batch)], dtype=torch.float64)
    finally:
        model.train(was_training)
    if ranks > 1:
        sums = sums.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(sums)
    total, terms = sums.tolist()
    return total / terms if terms else float("nan")
