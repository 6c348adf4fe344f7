"""Recompute a loop over time in chunks: only the state between chunks is held.

    # In place of the loop in the model's forward:
    rate, state = checkpoint_timesteps(model.step, inputs, state, outputs="mean")

`step(x_t, state) -> (output_t, state)` must follow from its input, its state and its modules.
What a module stores itself, such as a neuron's potential, is restored for the recomputation; a step
that keeps state elsewhere raises `HiddenState`. Gradients flow through the state from the last
timestep to the first; nothing is detached.

Proof: `python -m pytest tests/primitives/test_snn_timesteps_contract.py`.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from numbers import Number
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from ..core.generators import generator_states, generators_kept, same_state, set_generator_states
from .rerun import BlockState, FlatCall, mark_returned_once, modules_of

TimestepFunction = Callable[[Any, Any], tuple[Any, Any]]

# Run the plain loop over timesteps.

OUTPUT_MODES = ("stack", "sum", "mean", "last")


def run_timesteps(
    step: TimestepFunction, inputs: Any, state: Any, *, time_dim: int = 0, outputs: str = "stack"
) -> tuple[Any, Any]:
    """Run the plain loop over all timesteps; return the collected outputs and the final state.

    `inputs` is a tensor with time in `time_dim`, or a sequence with one entry for each timestep.
    `outputs` selects what is collected: "stack" for all outputs, stacked along `time_dim`; "sum" or
    "mean" over time; or only the "last".
    """
    collected = Collected(outputs, time_dim)
    state = _take_steps(step, slice_time(inputs, time_dim), state, collected)
    return collected.finish(), state


def _take_steps(
    step: TimestepFunction, timesteps: Sequence[Any], state: Any, collected: "Collected | None"
) -> Any:
    """Run a step on each timestep, collect the outputs if wanted, and return the last state."""
    for x in timesteps:
        output, state = take_step(step, x, state)
        if collected is not None:
            collected.add(output)
    return state


def take_step(step: TimestepFunction, x: Any, state: Any) -> tuple[Any, Any]:
    """Run one step and check that it returns a pair."""
    result: Any = step(x, state)
    if not (isinstance(result, tuple | list) and len(result) == 2):
        raise ValueError(f"step must return a pair, (output, state), not {result!r:.80}")
    return result[0], result[1]


def slice_time(inputs: Any, time_dim: int) -> Sequence[Any]:
    """Divide inputs into one entry for each timestep; raise if there is none."""
    if isinstance(inputs, Tensor):
        # The backward of `unbind` makes one gradient for all slices. Every `select` would make one
        # that is as large as the input.
        inputs = inputs.unbind(time_dim)
    elif (
        not isinstance(inputs, Sequence)
        or isinstance(inputs, str | bytes)
        or hasattr(inputs, "_fields")
    ):
        raise ValueError(
            "inputs must be a tensor, or a sequence with one entry for each timestep; got "
            f"{type(inputs).__name__}"
        )
    if not inputs:
        raise ValueError("inputs have no timestep to run: is time_dim right?")
    return inputs


@dataclass
class Collected:
    """Outputs collected over time; sums are taken in the order of time, as in a plain loop."""

    outputs: str
    time_dim: int
    count: int = 0
    # All outputs to stack; else the last one, or the sum.
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.outputs not in OUTPUT_MODES:
            raise ValueError(
                f"outputs must be one of {', '.join(OUTPUT_MODES)}; got {self.outputs!r}"
            )

    def add(self, output: Any) -> None:
        self.count += 1
        if self.outputs == "last":
            self.kept.clear()
        elif self.outputs != "stack":
            # Torch refuses the plus of truth values, whose sum would be one truth value.
            output = tree_map(operator.pos, output)
            if self.kept:
                output = tree_map(operator.add, self.kept.pop(), output)
        self.kept.append(output)

    def finish(self) -> Any:
        """Return the collected outputs and release them: recomputation keeps this object alive."""
        kept = self.kept
        self.kept = []
        if self.outputs == "stack":
            return tree_map(self._stack, *kept)
        if self.outputs == "mean":
            return tree_map(lambda leaf: leaf / self.count, kept[0])
        return kept[0]

    def _stack(self, *leaves: Any) -> Any:
        """Stack along `time_dim`, or along the last dimension if the output has too few."""
        if not isinstance(leaves[0], Tensor):
            return leaves
        num_dims = leaves[0].dim()
        return torch.stack(leaves, dim=max(-num_dims - 1, min(self.time_dim, num_dims)))


# Choose chunks of consecutive timesteps. Every chunk but the last is recomputed in backward, which
# starts with the last one.


@dataclass(frozen=True)
class Costs:
    """Measured bytes of chunked timesteps."""

    boundary_bytes: int  # of the state that a chunk saves as its starting point
    step_bytes: int  # that each timestep holds for backward


def even_chunks(num_steps: int, chunk_size: int) -> list[int]:
    """Return the sizes of chunks that are equal but for the last."""
    return [min(chunk_size, num_steps - start) for start in range(0, num_steps, chunk_size)]


@lru_cache(maxsize=256)
def best_chunks(num_steps: int, costs: Costs) -> list[int]:
    """Return the sizes of the chunks with the lowest peak.

    Each chunk is as long as fits under that peak beside the boundaries that are held with it.
    """
    most = num_steps * costs.step_bytes + 1
    peak = bisect_left(
        range(most), True, key=lambda peak: bool(_find_chunk_sizes(peak, num_steps, costs))
    )
    return _find_chunk_sizes(peak, num_steps, costs)


def _find_chunk_sizes(peak: int, num_steps: int, costs: Costs) -> list[int]:
    """Return the sizes of the longest chunks under a peak, or none if there are no such chunks."""
    sizes: list[int] = []
    left = num_steps
    available = peak
    while left * costs.step_bytes > available:
        # This chunk is not the last, so its own boundary is held beside it.
        available -= costs.boundary_bytes
        size = available // costs.step_bytes
        if size < 1:
            return []
        sizes.append(size)
        left -= size
    return [*sizes, left]


# Find state that a step keeps outside of its modules, which no recomputation could restore.

NUM_CHECKED_STEPS = 3
# Functions and objects between a step and the modules that it calls.
DEEPEST_SEARCH = 3


class HiddenState(ValueError):
    """A step keeps state of its own, so running it again gives another result."""


def check_step(step: TimestepFunction, timesteps: Sequence[Any], state: Any) -> Costs:
    """Measure the costs of a step, and raise `HiddenState` if it can't be run again.

    The first timesteps run twice from the same modules and random numbers. The second run must give
    the same to the bit: outputs, states and what autograd saves.
    """
    modules = modules_of(step, depth=DEEPEST_SEARCH)
    (first, costs), (second, _) = (_run_checked(step, timesteps, state, modules) for _ in range(2))
    # On other devices a kernel may add in another order each time.
    if all(value.device.type == "cpu" for value in first if isinstance(value, Tensor)):
        try:
            assert_close(first, second, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            raise HiddenState(
                "step computes something else the second time, from the same input, state and "
                "modules: it keeps state outside of its modules (in an object, a variable, a "
                "global, or a random generator of its own), and a recomputed chunk would start "
                "from the last value: gradients would be wrong without any error. Pass it in and "
                "return it with the state, or store it in a module"
            ) from error
    return costs


def _run_checked(
    step: TimestepFunction, timesteps: Sequence[Any], state: Any, modules: Sequence[nn.Module]
) -> tuple[list[Any], Costs]:
    """Run the first timesteps on copies; return what a second run has to repeat, and the costs."""
    results: list[Any] = []
    state = detached_copies(state)
    inputs = [
        detached_copies(timesteps[min(index, len(timesteps) - 1)])
        for index in range(NUM_CHECKED_STEPS)
    ]
    # The storages of the inputs, and those that autograd saves. It saves parameters in the first
    # step, whose bytes do not count.
    storages = _find_storages(inputs)
    held = []

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            results.append(tensor.detach().clone())
        storages.update(_find_storages(tensor))
        return tensor

    # Modules and random generators are restored: these steps only examine a loop.
    hooks = saved_tensors_hooks(note, lambda tensor: tensor)
    with generators_kept(), torch.enable_grad(), BlockState(modules), hooks:
        for x in inputs:
            leaves = tree_leaves((x, state))
            given = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
            output, state = take_step(step, x, state)
            if any(leaf._version != version for leaf, version in given):
                raise ValueError(
                    "step writes into the input or the state that it is given, which is needed "
                    "again in backward: make a new tensor (v = v * decay, not v *= decay)"
                )
            leaves = tree_leaves(detached_copies((output, state)))
            results += [leaf for leaf in leaves if isinstance(leaf, Tensor | Number)]
            held.append(sum(storages.values()))
    # The first timestep may hold other bytes, because it starts from the initial state.
    return results, Costs(sum(_find_storages(state).values()), held[2] - held[1])


def _find_storages(tree: Any) -> dict[torch.UntypedStorage, int]:
    """Return the storages of the dense tensors in a tree, with their bytes."""
    return {
        leaf.untyped_storage(): leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    }


def detached_copies(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), tree)


# Recompute a loop over time in chunks.

# The costs of checked steps, by module and code of the step. A function that is created anew and
# reaches no module is checked at each call.
_known: WeakKeyDictionary[Any, dict[Any, Costs]] = WeakKeyDictionary()


# Tracing would unroll the loop. `torch.compiler.disable` would import the compiler here.
@_disable_dynamo
def checkpoint_timesteps(
    step: TimestepFunction,
    inputs: Any,
    state: Any,
    *,
    chunk_size: int | None = None,
    time_dim: int = 0,
    outputs: str = "stack",
) -> tuple[Any, Any]:
    """Run the loop bit for bit as `run_timesteps`, holding one chunk of timesteps at a time.

    The states between chunks are held as well. `inputs` is a tensor with time in `time_dim`, or a
    sequence of timesteps. `outputs` is "stack", "sum", "mean" or "last"; only "stack" holds an
    output for each timestep. Each timestep is recomputed at most once.

    Without `chunk_size` chunks get shorter towards the end; with it all have the same size. The
    first call runs a few steps to measure their bytes and to detect hidden state.
    In eval mode, without grad mode, and with one chunk for all timesteps, this is the plain loop.
    """
    check_size(chunk_size)
    timesteps = slice_time(inputs, time_dim)
    modules = modules_of(step, depth=DEEPEST_SEARCH)
    is_eval = modules and not any(module.training for module in modules)
    collected = Collected(outputs, time_dim)
    sizes = [len(timesteps)]
    if torch.is_grad_enabled() and not is_eval:
        # A method, lambda or partial that is created anew for each use has the same code or class.
        function: Any = step
        while isinstance(function, partial):
            function = function.func
        key = getattr(function, "__code__", type(function)), tuple(map(id, modules))
        known = _known.setdefault(modules[0] if modules else step, {})
        if key not in known:
            known[key] = check_step(step, timesteps, state)
        if chunk_size is None:
            sizes = best_chunks(len(timesteps), known[key])
        else:
            sizes = even_chunks(len(timesteps), chunk_size)
    for size in sizes[:-1]:
        state = _run_chunk(step, state, timesteps[:size], collected=collected, modules=modules)
        timesteps = timesteps[size:]
    state = _take_steps(step, timesteps, state, collected)
    return collected.finish(), state


def check_size(chunk_size: int | None) -> None:
    """Raise an error unless the size is None or a positive whole number."""
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ValueError(
            "chunk_size must be a whole number from 1 up, or None to measure it; "
            f"got {chunk_size!r}"
        )


def _run_chunk(
    step: TimestepFunction,
    state: Any,
    timesteps: Sequence[Any],
    *,
    collected: Collected,
    modules: Sequence[nn.Module],
) -> Any:
    """Run timesteps under one checkpoint; only the first run collects outputs."""
    first: list[Collected] = [collected]
    drawn_from: dict[str, Any] = {}

    def run(state: Any, *timesteps: Any) -> Any:
        if first:
            generators = generator_states()
            state = _take_steps(step, timesteps, state, first.pop())
            # Most steps draw no random numbers, and a generator state takes 5 KB.
            if not same_state(generators, generator_states()):
                drawn_from.update(generators)
            return state
        with generators_kept():
            set_generator_states(drawn_from)
            return _take_steps(step, timesteps, state, None)

    call = FlatCall(run, ((state, *timesteps), {}), modules=modules)
    # The chunk itself restores generators.
    state = checkpoint(call, *call.take_tensors(), use_reentrant=False, preserve_rng_state=False)
    mark_returned_once(state)
    return state
