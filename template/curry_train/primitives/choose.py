"""Choose settings from measured bytes: layers to recompute, segments, sizes of chunks.

Proof: `python -m pytest tests/primitives/test_strategies.py`.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..core.blocks import find_blocks
from ..core.measure import (
    LayerMemory,
    Loss,
    as_trained,
    divide,
    measure_layers,
    measure_memory,
)
from ..core.rerun import generators_kept
from .hidden_state import TimestepFunction, holders_of, put_back_later
from .recompute import ChainBroken, chains_of, recompute_segments, remove_segments
from .snn_timesteps import (
    ChunkSchedule,
    Costs,
    check_chunks,
    even_schedule,
    measure_costs,
    slice_time,
)

Blocks = str | Sequence[str] | None


def profile_layers(
    model: nn.Module, batch: Any, loss: Loss, blocks: Blocks = None
) -> list[LayerMemory]:
    """Measure what the layers of a model hold for backward, most bytes first, after a warm-up."""
    layers = divide(model, blocks=blocks)
    with as_trained(model):
        measure_layers(model, batch, loss, layers)
        measured = measure_layers(model, batch, loss, layers)
    return sorted(measured, key=lambda layer: -layer.bytes)


def choose_largest(layers: Sequence[LayerMemory], gap: int) -> tuple[list[str], int]:
    """Choose layers to recompute that free `gap` bytes; return them and the bytes still lacking.

    The choice is greedy: take the largest saving until a single layer can close the gap, then the
    smallest saving that closes it. Of equal layers the first is taken, because the last ones would
    be recomputed while most bytes are held.
    """
    chosen: list[str] = []
    left = sorted(
        (layer for layer in layers if layer.saving_bytes > 0),
        key=lambda layer: layer.saving_bytes,
    )
    while gap > 0 and left:
        enough = [layer.saving_bytes for layer in left if layer.saving_bytes >= gap]
        wanted = min(enough, default=left[-1].saving_bytes)
        layer = next(layer for layer in left if layer.saving_bytes == wanted)
        left.remove(layer)
        chosen.append(layer.name)
        gap -= layer.saving_bytes
    return chosen, max(0, gap)


def choose_segments(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    blocks: str | Sequence[str] | None = None,
) -> int:
    """Measure which number of segments has the lowest peak.

    Of several with the same peak the smallest number is returned, which recomputes least.
    """
    longest = max(len(chain) for chain in chains_of(list(find_blocks(model, blocks))))
    peaks = {}
    for count in sorted({-(-longest // size) for size in range(1, longest + 1)}):
        recompute_segments(model, count, blocks=blocks)
        try:
            peaks[count] = measure_memory(model, batch, loss).peak_bytes
        except ChainBroken:
            # Segments of one block never break the chain, and a single segment is not recomputed.
            continue
        finally:
            remove_segments(model)
    return min(peaks, key=lambda count: (peaks[count], count))


def choose_chunk_size(
    step: TimestepFunction, inputs: Any, state: Any, *, levels: int = 1, time_dim: int = 0
) -> int:
    """Choose the size of even chunks with the lowest peak, from measured bytes.

    It is near sqrt(T * state bytes / step bytes): a small state and a large step give short chunks.
    """
    check_chunks(None, levels)
    timesteps = slice_time(inputs, time_dim)
    with generators_kept(), put_back_later(holders_of(step)):
        costs = measure_costs(step, timesteps, state)
    return best_chunk_size(len(timesteps), costs, levels)


def best_chunk_size(num_steps: int, costs: Costs, levels: int) -> int:
    """Return the size of even chunks with the lowest peak; of several such sizes, the largest.

    It is near sqrt(T*b/s), which is not sqrt(T). With two levels, where C = sqrt(T*c), it is near
    cbrt(T*(b/s)**2).
    """
    peaks = {
        size: schedule_peak_bytes(even_schedule(num_steps, size, levels), costs)
        for size in range(1, num_steps + 1)
    }
    return min(peaks, key=lambda size: (peaks[size], -size))


def schedule_peak_bytes(schedule: ChunkSchedule, costs: Costs) -> int:
    """Return the peak held bytes: the boundaries up to a chunk, and that chunk's own peak."""
    if not schedule.chunks:
        return schedule.num_steps * costs.step_bytes
    *earlier_peaks, last_peak = (schedule_peak_bytes(chunk, costs) for chunk in schedule.chunks)
    held = [(index + 1) * costs.boundary_bytes + peak for index, peak in enumerate(earlier_peaks)]
    return max([*held, len(earlier_peaks) * costs.boundary_bytes + last_peak])


def times_again(schedule: ChunkSchedule) -> list[int]:
    """Return how often each timestep is recomputed in backward."""
    if not schedule.chunks:
        return [0] * schedule.num_steps
    *earlier, last = (times_again(chunk) for chunk in schedule.chunks)
    return [1 + times for chunk in earlier for times in chunk] + last
