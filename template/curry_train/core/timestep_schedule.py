"""Choose chunks of timesteps, possibly nested, to recompute together.

Let each of T timesteps hold s bytes for backward, and let the state be b bytes. Even chunks of c
timesteps hold T/c boundaries and the c timesteps of one chunk, which is least at c = sqrt(T*b/s),
with 2*sqrt(T*b*s) bytes. But backward runs through the last chunk while every boundary is held, and
through the first chunk while only one is. So with chunks that get shorter by b/s timesteps each,
sqrt(2*T*b*s) bytes are enough.

Proof: `python -m pytest tests/test_snn_timesteps_contract.py`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .measure import LiveStorages
from .timesteps import Step, take_step


@dataclass(frozen=True)
class Costs:
    """Measured bytes of chunked timesteps."""

    # Bytes of the state that a chunk saves as its starting point.
    boundary_bytes: int

    # Bytes that each timestep holds for backward.
    step_bytes: int


@dataclass(frozen=True)
class Schedule:
    """Consecutive timesteps, divided into chunks, or undivided if `chunks` is empty.

    Every chunk but the last is recomputed in backward, which starts with the last one.
    """

    num_steps: int
    chunks: tuple["Schedule", ...] = ()


def measure_costs(step: Step, timesteps: Sequence[Any], state: Any) -> Costs:
    """Measure the bytes of the state and the held bytes that the third timestep adds.

    The first timestep may hold other bytes, because it starts from the initial state.
    """
    held = []
    generator_before = torch.get_rng_state()
    with torch.enable_grad(), LiveStorages() as storages:
        for index in range(3):
            _, state = take_step(step, timesteps[min(index, len(timesteps) - 1)], state)
            held.append(storages.bytes_alive)
    generator_after = torch.get_rng_state()

    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    storage_bytes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    boundary_bytes = sum(storage_bytes.values())

    # A chunk that draws random numbers saves the generator's state too.
    if not torch.equal(generator_before, generator_after):
        boundary_bytes += generator_after.nbytes
    return Costs(boundary_bytes, held[2] - held[1])


def even_schedule(num_steps: int, chunk_size: int, levels: int) -> Schedule:
    """Divide timesteps into chunks of one size.

    With two levels, outer chunks of C timesteps consist of whole inner chunks of c timesteps. The
    T/C + C/c boundaries are fewest at C = sqrt(T*c).
    """

    def num_boundaries(inner_per_outer: int) -> int:
        return -(-num_steps // (inner_per_outer * chunk_size)) + inner_per_outer

    size = chunk_size
    if levels == 2:
        near = max(1, int((num_steps / chunk_size) ** 0.5))
        size *= min((near, near + 1), key=num_boundaries)

    sizes = [min(size, num_steps - start) for start in range(0, num_steps, size)]
    if levels == 2:
        return Schedule(num_steps, tuple(even_schedule(size, chunk_size, 1) for size in sizes))
    return Schedule(num_steps, tuple(Schedule(size) for size in sizes))


@lru_cache(maxsize=256)
def best_schedule(num_steps: int, costs: Costs, levels: int) -> Schedule:
    """Return the chunks with the lowest peak.

    Each chunk is as long as fits under that peak beside the boundaries that are held with it.
    """
    if not levels:
        return Schedule(num_steps)
    most = num_steps * (costs.step_bytes + costs.boundary_bytes) + 1
    peak = bisect_left(
        range(most), num_steps, key=lambda peak: _fitting(peak, num_steps, costs, levels)
    )
    sizes: list[int] = []
    left = num_steps
    available = peak
    while left > _fitting(available, left, costs, levels - 1):
        # This chunk is not the last, so its own boundary is held beside it.
        available -= costs.boundary_bytes
        sizes.append(_fitting(available, left, costs, levels - 1))
        left -= sizes[-1]
    sizes.append(left)
    return Schedule(num_steps, tuple(best_schedule(size, costs, levels - 1) for size in sizes))


def best_chunk_size(num_steps: int, costs: Costs, levels: int) -> int:
    """Return the size of even chunks with the lowest peak; of several such sizes, the largest.

    It is near sqrt(T*b/s), which is not sqrt(T). With two levels, where C = sqrt(T*c), it is near
    cbrt(T*(b/s)**2).
    """
    peaks = {
        size: peak_bytes(even_schedule(num_steps, size, levels), costs)
        for size in range(1, num_steps + 1)
    }
    return min(peaks, key=lambda size: (peaks[size], -size))


def peak_bytes(schedule: Schedule, costs: Costs) -> int:
    """Return the peak held bytes: the boundaries up to a chunk, and that chunk's own peak."""
    if not schedule.chunks:
        return schedule.num_steps * costs.step_bytes
    *earlier_peaks, last_peak = (peak_bytes(chunk, costs) for chunk in schedule.chunks)
    held = [(index + 1) * costs.boundary_bytes + peak for index, peak in enumerate(earlier_peaks)]
    return max([*held, len(earlier_peaks) * costs.boundary_bytes + last_peak])


def times_again(schedule: Schedule) -> list[int]:
    """Return how often each timestep is recomputed in backward."""
    if not schedule.chunks:
        return [0] * schedule.num_steps
    *earlier, last = (times_again(chunk) for chunk in schedule.chunks)
    return [1 + times for chunk in earlier for times in chunk] + last


def _fitting(peak: int, enough: int, costs: Costs, levels: int) -> int:
    """Return how many timesteps fit under a peak, at most `enough`."""
    if peak < costs.step_bytes:
        return 0
    if not levels:
        return min(enough, peak // costs.step_bytes) if costs.step_bytes else enough
    fitting = 0
    boundaries = 0
    while fitting < enough:
        left = peak - boundaries * costs.boundary_bytes
        chunk = _fitting(left - costs.boundary_bytes, enough - fitting, costs, levels - 1)
        if not chunk:
            return min(enough, fitting + _fitting(left, enough - fitting, costs, levels - 1))
        fitting += chunk
        boundaries += 1
    return enough
