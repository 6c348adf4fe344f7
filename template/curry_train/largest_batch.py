"""Find the largest batch whose training step fits into a number of bytes.

Each candidate batch size is measured by running a step.

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

MOST = 2**24  # if a batch this large fits, memory does not depend on the batch size


def largest_batch(case: Case, model: nn.Module, limit: int, *, hint: int | None = None) -> int:
    """Return the most samples whose step fits into `limit` bytes; 0 if not even one does.

    `hint` is a size to start from, such as the answer for a similar model.
    """
    return search(
        lambda size: _bytes_or_none(case, model, size),
        limit,
        start=hint or case.batch_size,
        close=bool(hint),
    )


def step_bytes(case: Case, model: nn.Module, size: int) -> int:
    """Return the bytes of parameters, buffers, the batch, and the peak of forward and backward.

    The peak includes gradients.
    """
    batch = case.batch(size)
    tensors = [*model.parameters(), *model.buffers()]
    map_tensors(batch, tensors.append)
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    with seeded(case.seed):
        memory = measure_memory(model, batch, case.workload.mean_loss)
    return sum(storages.values()) + memory.peak_bytes


def check_limit(limit: int, device: torch.device) -> None:
    """Refuse a limit above the memory of the device, because steps are run to be measured."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit > total:
        raise ValueError(
            f"a limit of {format_bytes(limit)} is more than the {format_bytes(total)} of {device}, "
            "and batches are measured by running them; use a lower limit, or a larger machine"
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
    """Return the largest size within the limit; it and the next larger size were both measured.

    A size is at most doubled from one try to the next. `bytes_of` returns None where the step ran
    out of memory. `close` means that `start` is a good guess.
    """
    known: dict[int, int | None] = {}
    low = 0
    high = None
    size = start
    tries = 0
    while True:
        known[size] = measured = bytes_of(size)
        if measured is not None and measured <= limit:
            low = size
        else:
            high = size
        if high is not None and high - low <= 1:
            return low

        tries += 1
        if close and high is None and tries == 1:
            size = low + 1
        else:
            size = _next(known, low, high, limit, tries)
        if size > MOST:
            raise ValueError(
                f"{MOST:,} samples fit {format_bytes(limit)}: memory does not grow with the batch"
            )


def _next(known: dict[int, int | None], low: int, high: int | None, limit: int, tries: int) -> int:
    """Interpolate the size that would reach the limit if bytes grew linearly.

    Every third try is the middle instead, in case growth is not linear.
    """
    points: list[tuple[int, Any]] = sorted(
        (size, num_bytes) for size, num_bytes in known.items() if num_bytes is not None
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
