"""Which timesteps to compute again together: chunks, or chunks inside larger chunks, from what was measured.

Let the state be b bytes and a timestep hold s bytes for backward. T/c boundaries and c timesteps are least for chunks
of c = sqrt(T*b/s), at 2*sqrt(T*b*s) bytes. But backward goes through the last chunk while every boundary is held, and
through the first while one is: with chunks that get shorter by b/s each, sqrt(2*T*b*s) do. Proof:
`python -m pytest tests/test_snn_timesteps_contract.py`.
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
    """Bytes that a chunk keeps of the state it starts from, and bytes that each timestep holds for backward."""

    boundary_bytes: int
    step_bytes: int


@dataclass(frozen=True)
class Schedule:
    """Timesteps that follow each other, in chunks or, where there are none, as they are.

    Every chunk but the last is computed again in backward, which needs the last one first.
    """

    num_steps: int
    chunks: tuple["Schedule", ...] = ()


def measure_costs(step: Step, timesteps: Sequence[Any], state: Any) -> Costs:
    """What the third timestep adds to what is held; the first may differ, because it meets the initial state."""
    held, before = [], torch.get_rng_state()
    with torch.enable_grad(), LiveStorages() as storages:
        for index in range(3):
            _, state = take_step(step, timesteps[min(index, len(timesteps) - 1)], state)
            held.append(storages.bytes_alive)
    after = torch.get_rng_state()
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    kept = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    drawn = (
        0 if torch.equal(before, after) else after.nbytes
    )  # a chunk that draws keeps the generator's state
    return Costs(sum(kept.values()) + drawn, held[2] - held[1])


def even_schedule(num_steps: int, chunk_size: int, levels: int) -> Schedule:
    """Chunks of one size. With two levels, larger chunks of C timesteps hold whole ones of c: the T/C + C/c boundaries
    are fewest at C = sqrt(T*c)."""
    size = chunk_size
    if levels == 2:
        near = max(1, int((num_steps / chunk_size) ** 0.5))
        size *= min(
            (near, near + 1), key=lambda count: -(-num_steps // (count * chunk_size)) + count
        )
    sizes = [min(size, num_steps - start) for start in range(0, num_steps, size)]
    inside = [
        even_schedule(part, chunk_size, 1) if levels == 2 else Schedule(part) for part in sizes
    ]
    return Schedule(num_steps, tuple(inside))


@lru_cache(maxsize=256)
def best_schedule(num_steps: int, costs: Costs, levels: int) -> Schedule:
    """The chunks with the lowest peak: each as long as fits beside the boundaries that are held with it."""
    if not levels:
        return Schedule(num_steps)
    most = num_steps * (costs.step_bytes + costs.boundary_bytes) + 1
    peak = bisect_left(
        range(most), num_steps, key=lambda peak: _fitting(peak, num_steps, costs, levels)
    )
    sizes: list[int] = []
    left = num_steps
    while left > (
        last := _fitting(peak - len(sizes) * costs.boundary_bytes, left, costs, levels - 1)
    ):
        sizes.append(
            _fitting(peak - (len(sizes) + 1) * costs.boundary_bytes, left, costs, levels - 1)
        )
        left -= sizes[-1]
    return Schedule(
        num_steps,
        tuple(best_schedule(size, costs, levels - 1) for size in (*sizes, min(left, last))),
    )


def best_chunk_size(num_steps: int, costs: Costs, levels: int) -> int:
    """The size of even chunks with the lowest peak; of equal ones the largest.

    Near sqrt(T*b/s), which is not sqrt(T). With two levels, where C = sqrt(T*c), it is cbrt(T*(b/s)**2).
    """
    peaks = {
        size: peak_bytes(even_schedule(num_steps, size, levels), costs)
        for size in range(1, num_steps + 1)
    }
    return min(peaks, key=lambda size: (peaks[size], -size))


def peak_bytes(schedule: Schedule, costs: Costs) -> int:
    """The most that is held at once: the boundaries up to a chunk and, inside, that chunk's timesteps."""
    if not schedule.chunks:
        return schedule.num_steps * costs.step_bytes
    *before, last = (peak_bytes(chunk, costs) for chunk in schedule.chunks)
    held = [(index + 1) * costs.boundary_bytes + peak for index, peak in enumerate(before)]
    return max([*held, len(before) * costs.boundary_bytes + last])


def times_again(schedule: Schedule) -> list[int]:
    """How often each timestep is computed again in backward."""
    if not schedule.chunks:
        return [0] * schedule.num_steps
    *before, last = (times_again(chunk) for chunk in schedule.chunks)
    return [1 + times for chunk in before for times in chunk] + last


def _fitting(peak: int, enough: int, costs: Costs, levels: int) -> int:
    """How many timesteps fit under a peak, up to enough of them."""
    if peak < costs.step_bytes:
        return 0
    if not levels:
        return min(enough, peak // costs.step_bytes) if costs.step_bytes else enough
    fitting, boundaries = 0, 0
    while fitting < enough:
        left = peak - boundaries * costs.boundary_bytes
        chunk = _fitting(left - costs.boundary_bytes, enough - fitting, costs, levels - 1)
        if not chunk:
            return min(enough, fitting + _fitting(left, enough - fitting, costs, levels - 1))
        fitting, boundaries = fitting + chunk, boundaries + 1
    return enough
