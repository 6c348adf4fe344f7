"""The largest batch whose training step fits a number of bytes, by measuring steps.

Proof: `python -m pytest tests/test_savings.py -k largest`.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .core.batches import map_tensors
from .core.measure import measure_memory
from .core.out_of_memory import is_out_of_memory
from .core.sizes import format_bytes
from .core.untouched import seeded
from .core.workload import Case

MOST = 2**24  # a batch this large that still fits means that memory does not depend on it


def largest_batch(case: Case, model: nn.Module, limit: int, *, hint: int | None = None) -> int:
    """The most samples that a step of `model` fits into `limit` bytes; 0 if not even one does.

    `hint` is a size to start from, as a rule the answer for a model that differs little.
    """
    return search(
        lambda size: _bytes_or_none(case, model, size),
        limit,
        start=hint or case.batch_size,
        close=bool(hint),
    )


def step_bytes(case: Case, model: nn.Module, size: int) -> int:
    """What a step needs: parameters, buffers, the batch, and the peak of forward and backward, gradients included."""
    batch = case.batch(size)
    tensors = [*model.parameters(), *model.buffers()]
    map_tensors(batch, tensors.append)
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    with seeded(case.seed):
        return (
            sum(storages.values())
            + measure_memory(model, batch, case.workload.mean_loss).peak_bytes
        )


def check_limit(limit: int, device: torch.device) -> None:
    """A step is run to be measured, so the limit can't be more than there is."""
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit > there:
        raise ValueError(
            f"a limit of {format_bytes(limit)} is more than the {format_bytes(there)} of {device}, and batches are "
            "measured by running them; use a lower limit, or a larger machine"
        )


def _bytes_or_none(case: Case, model: nn.Module, size: int) -> int | None:
    try:
        return step_bytes(case, model, size)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def search(
    bytes_of: Callable[[int], int | None], limit: int, *, start: int, close: bool = False
) -> int:
    """The largest size whose bytes are within the limit; the answer and the size above it were both measured.

    Sizes at most double. `bytes_of` is None where nothing fits at all; `close` says that `start` is a good guess.
    """
    known: dict[int, int | None] = {}
    low, high, size, tries = 0, None, start, 0
    while True:
        known[size] = measured = bytes_of(size)
        if measured is not None and measured <= limit:
            low = size
        else:
            high = size
        if high is not None and high - low <= 1:
            return low
        tries += 1
        size = (
            low + 1
            if close and high is None and tries == 1
            else _next(known, low, high, limit, tries)
        )
        if size > MOST:
            raise ValueError(
                f"{MOST:,} samples fit {format_bytes(limit)}: memory does not grow with the batch"
            )


def _next(known: dict[int, int | None], low: int, high: int | None, limit: int, tries: int) -> int:
    """Where bytes that grow evenly would reach the limit; every third try the middle, in case that they do not."""
    points: list[tuple[int, Any]] = sorted(
        (size, found) for size, found in known.items() if found is not None
    )
    below = [point for point in points if point[0] <= low]
    above = [point for point in points if high is not None and point[0] >= high]
    top = 2 * low if high is None else high - 1
    if low == 0 or (high is not None and tries % 3 == 0):
        return max(1, (low + (high or 2)) // 2)
    pair = [*below[-1:], *above[:1]] if above else below[-2:]
    if len(pair) < 2 or pair[1][1] <= pair[0][1]:
        return top if high is None else (low + high) // 2
    (left, left_bytes), (right, right_bytes) = pair
    guess = left + (limit - left_bytes) * (right - left) // (right_bytes - left_bytes)
    return min(max(guess, low + 1), top)
