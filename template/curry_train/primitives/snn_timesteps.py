"""Recompute a loop over time in chunks: only the state between chunks is held.

    # In place of the loop in the model's forward:
    rate, state = checkpoint_timesteps(model.step, inputs, state, outputs="mean")
    # Or, for a model whose loop is a method `unroll`, without editing it:
    recompute_timesteps(model)

`step(x_t, state) -> (output_t, state)` must be a function of its input and state; a step that holds
state of its own raises `HiddenState`. Gradients flow through the state from the last timestep to
the first; nothing is detached.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import inspect
import operator
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..core.generators import Generators, generators_kept
from ..core.rerun import (
    check_unchanged,
    function_modes,
    function_modes_as,
    mark_returned_once,
    statistics_kept,
)
from .hidden_state import (
    Holders,
    TimestepFunction,
    check_step,
    code_of,
    holders_of,
    put_back_later,
    roots_of,
    take_step,
)

TIMESTEPS_ATTRIBUTE = "_timesteps"

# Run the plain loop over timesteps, and find the modules that have one.

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
        collected, self._all = self._all, []
        total, self._total = self._total, None
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


# Choose chunks of timesteps, possibly nested, to recompute together.


@dataclass(frozen=True)
class Costs:
    """Measured bytes of chunked timesteps."""

    boundary_bytes: int  # of the state that a chunk saves as its starting point
    step_bytes: int  # that each timestep holds for backward


@dataclass(frozen=True)
class ChunkSchedule:
    """Consecutive timesteps, divided into chunks, or undivided if `chunks` is empty.

    Every chunk but the last is recomputed in backward, which starts with the last one.
    """

    num_steps: int
    chunks: tuple["ChunkSchedule", ...] = ()


class _AliveBytes(TorchDispatchMode):
    """Count the bytes of the storages that operations have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._meet((args, kwargs), is_new=False)
        output = func(*args, **(kwargs or {}))
        self._meet(output, is_new=True)
        return output

    def _meet(self, values: Any, *, is_new: bool) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    nbytes = storage.nbytes() if is_new else 0
                    freed = partial(self._freed, storage._cdata, nbytes)
                    self._known[storage._cdata] = weakref.ref(storage, freed)
                    self.total += nbytes

    def _freed(self, address: int, nbytes: int, _: Any) -> None:
        self.total -= nbytes
        self._known.pop(address, None)


def measure_costs(step: TimestepFunction, timesteps: Sequence[Any], state: Any) -> Costs:
    """Measure the bytes of the state and the held bytes that the third timestep adds.

    The first timestep may hold other bytes, because it starts from the initial state.
    """
    held = []
    generators = Generators(tree_leaves(state))
    with torch.enable_grad(), _AliveBytes() as alive:
        for index in range(3):
            _, state = take_step(step, timesteps[min(index, len(timesteps) - 1)], state)
            held.append(alive.total)

    storages = [leaf.untyped_storage() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    boundary_bytes = sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    # A chunk that draws random numbers saves the generator's state too.
    if generators.moved():
        boundary_bytes += torch.get_rng_state().nbytes
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


def _fitting(peak: int, enough: int, costs: Costs, levels: int) -> int:
    """Return how many timesteps fit under a peak, at most `enough`."""
    if peak < costs.step_bytes:
        return 0
    if not levels:
        return min(enough, peak // costs.step_bytes) if costs.step_bytes else enough
    fitting = 0
    most = 0
    left = peak
    while fitting < enough:
        # Ending here may fit more than another chunk and its boundary.
        most = max(most, fitting + _fitting(left, enough - fitting, costs, levels - 1))
        left -= costs.boundary_bytes
        chunk = _fitting(left, enough - fitting, costs, levels - 1)
        if most >= enough or not chunk:
            return min(enough, most)
        fitting += chunk
    return enough


# Recompute a loop over time in chunks.


# Tracing would unroll the loop. `torch.compiler.disable` would import the compiler here.
@_disable_dynamo
def checkpoint_timesteps(
    step: TimestepFunction,
    inputs: Any,
    state: Any,
    *,
    chunk_size: int | None = None,
    levels: int = 1,
    time_dim: int = 0,
    outputs: str = "stack",
) -> tuple[Any, Any]:
    """Run the loop bit for bit as `run_timesteps`, holding one chunk of timesteps at a time.

    The states between chunks are held as well. `inputs` is a tensor with time in `time_dim`, or a
    sequence of timesteps. `outputs` is "stack", "sum", "mean" or "last"; only "stack" holds an
    output for each timestep. `levels=1` recomputes each timestep at most once; `levels=2` nests
    chunks in larger chunks and recomputes each timestep at most twice.

    Without `chunk_size` the first call measures costs, and chunks get shorter towards the end; with
    it all chunks have the same size. The first call also runs a few steps to detect hidden state.
    In eval mode, without grad mode, and with one chunk for all timesteps, this is the plain loop.
    """
    check_chunks(chunk_size, levels)
    timesteps = slice_time(inputs, time_dim)
    roots = roots_of(step)
    is_eval = roots and not any(module.training for module in roots.values())
    if is_eval or not torch.is_grad_enabled():
        return run_timesteps(step, inputs, state, time_dim=time_dim, outputs=outputs)

    collected = Collected(outputs, time_dim)
    known = _learn(step, roots, timesteps, state, costs=chunk_size is None)
    if known.costs is not None and chunk_size is None:
        schedule = best_schedule(len(timesteps), known.costs, levels)
    else:
        schedule = even_schedule(len(timesteps), chunk_size or len(timesteps), levels)

    holders = holders_of(step) if known.left_behind else {}
    left_behind = {name: value for name, value in holders.items() if name in known.left_behind}
    loop = _ChunkedLoop(
        step,
        timesteps,
        collected,
        modules=list(roots.values()),
        left_behind=left_behind,
    )
    state = loop.run(state, 0, schedule, again=False)
    return collected.finish(), state


def recompute_timesteps(
    model: nn.Module, *, chunk_size: int | None = None, levels: int = 1
) -> list[str]:
    """Make a model's loops over time recompute, in place, and return the modules' names.

    A module has such a loop if it calls
    `self.unroll(step, inputs, state, time_dim=..., outputs=...)`, with
    `unroll = staticmethod(run_timesteps)` or a similar method.
    """
    check_chunks(chunk_size, levels)
    found = steppers(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no method unroll(step, inputs, state), so its loop over "
            "time can't be replaced from outside; replace the loop in its forward by one line: "
            "outputs, state = checkpoint_timesteps(self.step, inputs, state, time_dim=0, "
            'outputs="stack")'
        )
    for name, module in found.items():
        if TIMESTEPS_ATTRIBUTE in module.__dict__:
            raise ValueError(
                f"{name or type(module).__name__} recomputes its timesteps already: call "
                "remove_timesteps(model) first"
            )
    unroll = partial(checkpoint_timesteps, chunk_size=chunk_size, levels=levels)
    for module in found.values():
        module.__dict__[TIMESTEPS_ATTRIBUTE] = module.__dict__.get("unroll")
        module.__dict__["unroll"] = unroll
    return list(found)


def remove_timesteps(model: nn.Module) -> list[str]:
    """Undo `recompute_timesteps` and return the names of the modules that were recomputing."""
    changed = []
    for name, module in model.named_modules():
        if TIMESTEPS_ATTRIBUTE in module.__dict__:
            changed.append(name)
            del module.__dict__["unroll"]
            before = module.__dict__.pop(TIMESTEPS_ATTRIBUTE)
            if before is not None:
                module.__dict__["unroll"] = before
    return changed


def steppers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules that have a method `unroll(step, inputs, state, ...)`.

    The keys are qualified names.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in found)
        unroll = getattr(module, "unroll", None)
        if inside or not callable(unroll):
            continue
        if list(inspect.signature(unroll).parameters)[:3] == ["step", "inputs", "state"]:
            found[name] = module
    return found


def check_chunks(chunk_size: int | None, levels: int) -> None:
    """Raise for an invalid chunk size or number of levels."""
    if levels not in (1, 2) or isinstance(levels, bool):
        raise ValueError(f"levels must be 1, or 2 for chunks inside larger chunks; got {levels!r}")
    if chunk_size is not None and (
        isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1
    ):
        raise ValueError(
            "chunk_size must be a whole number from 1 up, or None to measure it; "
            f"got {chunk_size!r}"
        )


@dataclass
class _Known:
    """Results of the first call with a step; a reference to a module would keep it alive."""

    left_behind: set[str]  # holders of values that the step changes and does not depend on
    costs: Costs | None = None


_known: WeakKeyDictionary[Any, dict[Any, _Known]] = WeakKeyDictionary()


def _learn(
    step: TimestepFunction,
    roots: Mapping[str, nn.Module],
    timesteps: Sequence[Any],
    state: Any,
    *,
    costs: bool,
) -> _Known:
    """Check a step for hidden state and measure its costs, once per function and its modules.

    For a function that is created anew and reaches no module, this happens at each call.
    """
    owner = next(iter(roots.values()), step)
    of_owner = _known.setdefault(owner, {})
    key = code_of(step), tuple(map(id, roots.values()))
    if key not in of_owner:
        of_owner[key] = _Known(check_step(step, timesteps, state))
    if costs and of_owner[key].costs is None:
        with generators_kept(), put_back_later(holders_of(step)):
            of_owner[key].costs = measure_costs(step, timesteps, state)
    return of_owner[key]


@dataclass
class _ChunkedLoop:
    """State shared by the chunks of one call."""

    step: TimestepFunction
    timesteps: Sequence[Any]
    collected: Collected
    modules: Sequence[nn.Module]
    left_behind: Holders  # what a recompute changes and must put back
    shape: TreeSpec | None = None
    versions: dict[int, list[int]] = field(default_factory=dict)

    def run(self, state: Any, first: int, schedule: ChunkSchedule, *, again: bool) -> Any:
        """Run the timesteps of a schedule and return the state after them.

        The last chunk is not recomputed, because backward needs it first.
        """
        if not schedule.chunks:
            for index in range(first, first + schedule.num_steps):
                output, state = take_step(self.step, self._timestep(index, again=again), state)
                if not again:
                    self.collected.add(output)
            return state
        *earlier, last = schedule.chunks
        for inside in earlier:
            leaves, shape = tree_flatten(state)
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and leaf.is_inference():
                    leaves[place] = leaf.clone()  # an inference tensor can't be saved for backward
            chunk = _Chunk(self, shape, first, inside, again)
            # The chunk itself restores generators and all else that its recompute must find.
            new_leaves = checkpoint(chunk, *leaves, use_reentrant=False, preserve_rng_state=False)
            mark_returned_once(new_leaves)
            state = tree_unflatten(list(new_leaves), self._check_shape(chunk.shape_after))
            first += inside.num_steps
        return self.run(state, first, last, again=again)

    def _timestep(self, index: int, *, again: bool) -> Any:
        """Return a timestep, after checking in the recompute that it was not modified.

        It is not an input of the checkpoint, so torch does not check it.
        """
        timestep = self.timesteps[index]
        leaves = (timestep,) if isinstance(timestep, Tensor) else tree_leaves(timestep)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        if not again:
            self.versions[index] = [tensor._version for tensor in tensors]
        for tensor, version in zip(tensors, self.versions[index], strict=False):
            check_unchanged(tensor, version)
        return timestep

    def _check_shape(self, shape: TreeSpec) -> TreeSpec:
        if self.shape is not None and shape != self.shape:
            raise ValueError(
                "the state that step returns changes its structure over time: keep its structure, "
                "and collect over time with `outputs`"
            )
        self.shape = shape
        return shape


@dataclass
class _Chunk:
    """Timesteps under one checkpoint; only the first run collects outputs and side effects."""

    loop: _ChunkedLoop
    shape: TreeSpec
    first: int
    inside: ChunkSchedule
    again: bool
    shape_after: TreeSpec = field(init=False)
    runs: int = 0
    drawn_from: Generators | None = None
    function_modes: list[Any] = field(default_factory=function_modes)

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        self.runs += 1
        if self.runs == 1:
            before = Generators([*leaves, *tree_leaves(self.loop.timesteps[self.first])])
            result = self._run(leaves, again=self.again)
            # Most steps draw no random numbers, and a generator state takes 5 KB.
            self.drawn_from = before if before.moved() else None
            return result

        with ExitStack() as stack:
            stack.enter_context(statistics_kept(self.loop.modules))
            stack.enter_context(function_modes_as(self.function_modes))
            if self.loop.left_behind:
                stack.enter_context(put_back_later(self.loop.left_behind))
            if self.drawn_from is not None:
                stack.enter_context(generators_kept())
                self.drawn_from.restore()
            return self._run(leaves, again=True)

    def _run(self, leaves: Sequence[Any], *, again: bool) -> tuple[Any, ...]:
        state = tree_unflatten(list(leaves), self.shape)
        state = self.loop.run(state, self.first, self.inside, again=again)
        new_leaves, self.shape_after = tree_flatten(state)
        return tuple(new_leaves)
