"""Run a loop over time in chunks that are recomputed, and choose the size of a chunk.

A step is `step(x_t, state) -> (output_t, state)`.

Proof: `python -m pytest tests/primitives/test_snn_timesteps_contract.py`.
"""

import inspect
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..core.measure import LiveStorages

# Run the plain loop over timesteps, and find the modules that have one.

TimestepFunction = Callable[[Any, Any], tuple[Any, Any]]
OUTPUT_MODES = ("stack", "sum", "mean", "last")


def run_timesteps(
    step: TimestepFunction, inputs: Any, state: Any, *, time_dim: int = 0, outputs: str = "stack"
) -> tuple[Any, Any]:
    """Run the plain loop over all timesteps; return the collected outputs and the final state.

    `inputs` is a tensor with time in `time_dim`, or a sequence with one entry for each timestep.
    `outputs` selects what is collected: "stack" for all outputs, stacked along `time_dim`; "sum" or
    "mean" over time; or only the "last".
    """
    timesteps = slice_time(inputs, time_dim)
    collected = Collected(outputs, time_dim)
    for x in timesteps:
        output, state = take_step(step, x, state)
        collected.add(output)
    return collected.finish(), state


def take_step(step: TimestepFunction, x: Any, state: Any) -> tuple[Any, Any]:
    """Run one step and check that it returns a pair."""
    result: Any = step(x, state)
    if not (isinstance(result, tuple | list) and len(result) == 2):
        is_sequence = isinstance(result, tuple | list)
        returned = f"{len(result)} values" if is_sequence else type(result).__name__
        raise ValueError(f"step must return a pair, (output, state), and returned {returned}")
    return result[0], result[1]


def slice_time(inputs: Any, time_dim: Any) -> Sequence[Any]:
    """Divide inputs into one entry for each timestep; raise if there is none."""
    if type(time_dim) is not int:
        raise ValueError(f"time_dim must be a whole number, got {time_dim!r}")
    if isinstance(inputs, Tensor):
        shape = tuple(inputs.shape)
        if not -inputs.dim() <= time_dim < inputs.dim():
            raise ValueError(
                f"inputs of shape {shape} have no dimension {time_dim}: set time_dim to the "
                "dimension of time"
            )
        if not shape[time_dim]:
            raise ValueError(
                f"inputs of shape {shape} have no timestep in dimension {time_dim}: is time_dim "
                "right?"
            )

        # The backward of `unbind` makes one gradient for all slices. Every `select` would make one
        # that is as large as the input.
        return inputs.unbind(time_dim)

    if (
        not isinstance(inputs, Sequence)
        or isinstance(inputs, str | bytes)
        or hasattr(inputs, "_fields")
    ):
        kind = type(inputs).__name__
        raise ValueError(
            f"inputs must be a tensor, or a sequence with one entry for each timestep; got {kind}"
        )
    if not inputs:
        raise ValueError("inputs are an empty sequence: there is no timestep to run")

    return inputs


@dataclass
class Collected:
    """Outputs collected over time; sums are taken in the order of time, as in a plain loop."""

    outputs: str
    time_dim: int
    _all: list[Any] = field(default_factory=list)
    _total: Any = None
    _count: int = 0

    def __post_init__(self) -> None:
        if self.outputs not in OUTPUT_MODES:
            raise ValueError(
                f"outputs must be one of {', '.join(OUTPUT_MODES)}; got {self.outputs!r}"
            )

    def add(self, output: Any) -> None:
        if self.outputs == "stack":
            self._all.append(output)
        elif self.outputs == "last" or self._count == 0:
            if self.outputs != "last" and any(_is_bool(leaf) for leaf in tree_leaves(output)):
                raise ValueError(
                    f"the {self.outputs} of truth values is not defined: return the output as "
                    "floating point"
                )
            self._total = output
        elif isinstance(output, Tensor):
            self._total = self._total + output
        else:
            self._total = tree_map(operator.add, self._total, output)
        self._count += 1

    def finish(self) -> Any:
        """Return the collected outputs and release them: recomputation keeps this object alive."""
        collected = self._all
        total = self._total
        self._all = []
        self._total = None
        if self.outputs == "stack":
            return tree_map(lambda *leaves: self._stack(leaves), *collected)
        if self.outputs == "mean":
            return tree_map(lambda leaf: leaf / self._count, total)
        return total

    def _stack(self, leaves: tuple[Any, ...]) -> Any:
        """Stack along `time_dim`, or along the last dimension if the output has too few."""
        if not isinstance(leaves[0], Tensor):
            return leaves
        num_dims = leaves[0].dim()
        return torch.stack(leaves, dim=max(-num_dims - 1, min(self.time_dim, num_dims)))


def _is_bool(leaf: Any) -> bool:
    return isinstance(leaf, bool) or (isinstance(leaf, Tensor) and leaf.dtype == torch.bool)


def steppers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules that have a method `unroll(step, inputs, state, ...)`.

    The keys are qualified names.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in found)
        if not inside and _is_unroll(getattr(module, "unroll", None)):
            found[name] = module
    return found


def _is_unroll(method: Any) -> bool:
    if not callable(method):
        return False
    names = list(inspect.signature(method).parameters)
    return names[:3] == ["step", "inputs", "state"]


# Choose chunks of timesteps, possibly nested, to recompute together.


@dataclass(frozen=True)
class Costs:
    """Measured bytes of chunked timesteps."""

    # Bytes of the state that a chunk saves as its starting point.
    boundary_bytes: int

    # Bytes that each timestep holds for backward.
    step_bytes: int


@dataclass(frozen=True)
class ChunkSchedule:
    """Consecutive timesteps, divided into chunks, or undivided if `chunks` is empty.

    Every chunk but the last is recomputed in backward, which starts with the last one.
    """

    num_steps: int
    chunks: tuple["ChunkSchedule", ...] = ()


def measure_costs(step: TimestepFunction, timesteps: Sequence[Any], state: Any) -> Costs:
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


def even_schedule(num_steps: int, chunk_size: int, levels: int) -> ChunkSchedule:
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
        return ChunkSchedule(num_steps, tuple(even_schedule(size, chunk_size, 1) for size in sizes))
    return ChunkSchedule(num_steps, tuple(ChunkSchedule(size) for size in sizes))


@lru_cache(maxsize=256)
def best_schedule(num_steps: int, costs: Costs, levels: int) -> ChunkSchedule:
    """Return the chunks with the lowest peak.

    Each chunk is as long as fits under that peak beside the boundaries that are held with it.
    """
    if not levels:
        return ChunkSchedule(num_steps)
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
    return ChunkSchedule(num_steps, tuple(best_schedule(size, costs, levels - 1) for size in sizes))


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
