"""Recompute a loop over time in chunks: only the state between chunks is held.

    # In place of the loop in the model's forward:
    rate, state = checkpoint_timesteps(model.step, inputs, state, outputs="mean")
    # Or, for a model whose loop is a method `unroll`, without editing it:
    recompute_timesteps(model)

`step(x_t, state) -> (output_t, state)` must be a function of its input and state; a step that holds
state of its own raises `HiddenState`. Gradients flow through the state from the last timestep to
the first; nothing is detached.

Proof: `python -m pytest tests/gates/test_snn_timesteps.py`.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..core.blocks import Derived, become, restore
from ..core.random import Generators, check_unchanged, generators_kept
from .checkpointed import RecomputeOptions, run_checkpointed
from .hidden_state import (
    Place,
    ValueKey,
    check_step,
    code_of,
    places_of,
    put_back_later,
    roots_of,
)
from .time_loop import (
    ChunkSchedule,
    Collected,
    Costs,
    TimestepFunction,
    best_chunk_size,
    best_schedule,
    even_schedule,
    measure_costs,
    run_timesteps,
    slice_time,
    steppers,
    take_step,
)

TIMESTEPS_ATTRIBUTE = "_timesteps"


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

    Without `chunk_size` the first call measures costs, and chunks get shorter towards the end
    (`primitives/time_loop.py`); with it all chunks have the same size. The first call also runs a
    few steps to detect hidden state. In eval mode, without grad mode, and with one chunk as long as
    the whole loop, this is the plain loop.
    """
    _check(chunk_size, levels)
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

    loop = _ChunkedLoop(
        step,
        timesteps,
        collected,
        modules=list(roots.values()),
        places=places_of(step) if known.left_behind else (),
        left_behind=known.left_behind,
    )
    state = loop.run(state, 0, schedule, again=False)
    return collected.finish(), state


def choose_chunk_size(
    step: TimestepFunction, inputs: Any, state: Any, *, levels: int = 1, time_dim: int = 0
) -> int:
    """Choose the size of even chunks with the lowest peak, from measured bytes.

    It is near sqrt(T * state bytes / step bytes): a small state and a large step give short chunks.
    """
    _check(None, levels)
    timesteps = slice_time(inputs, time_dim)
    with generators_kept(), put_back_later(places_of(step)):
        costs = measure_costs(step, timesteps, state)
    return best_chunk_size(len(timesteps), costs, levels)


class RecomputedTimesteps(Derived):
    """A module whose loop over time runs through `checkpoint_timesteps`."""

    def unroll(
        self, step: TimestepFunction, inputs: Any, state: Any, **options: Any
    ) -> tuple[Any, Any]:
        return checkpoint_timesteps(
            step, inputs, state, **self.__dict__[TIMESTEPS_ATTRIBUTE], **options
        )


def recompute_timesteps(
    model: nn.Module, *, chunk_size: int | None = None, levels: int = 1
) -> list[str]:
    """Make a model's loops over time recompute, in place, and return the modules' names.

    A module has such a loop if it calls
    `self.unroll(step, inputs, state, time_dim=..., outputs=...)`, with
    `unroll = staticmethod(run_timesteps)` or a similar method.
    """
    _check(chunk_size, levels)
    found = steppers(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no method unroll(step, inputs, state), so its loop over "
            "time can't be replaced from outside; replace the loop in its forward by one line: "
            "outputs, state = checkpoint_timesteps(self.step, inputs, state, time_dim=0, "
            'outputs="stack")'
        )
    for module in found.values():
        become(
            RecomputedTimesteps,
            module,
            **{TIMESTEPS_ATTRIBUTE: {"chunk_size": chunk_size, "levels": levels}},
        )
    return list(found)


def remove_timesteps(model: nn.Module) -> list[str]:
    """Undo `recompute_timesteps` and return the names of the modules that were recomputing."""
    names = [
        name for name, module in model.named_modules() if isinstance(module, RecomputedTimesteps)
    ]
    for name in names:
        restore(model.get_submodule(name), TIMESTEPS_ATTRIBUTE)
    return names


def _check(chunk_size: int | None, levels: int) -> None:
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
    """Results of the first call with a step.

    They hold names only: a reference to a module would keep it alive.
    """

    left_behind: Mapping[ValueKey, bool]
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
    if costs and not roots:
        raise ValueError(
            "step reaches no module to store a measurement for: pass chunk_size, such as "
            "choose_chunk_size(step, inputs, state), measured once"
        )

    owner = next(iter(roots.values()), step)
    of_owner = _known.setdefault(owner, {})
    key = code_of(step), tuple(map(id, roots.values()))
    if key not in of_owner:
        of_owner[key] = _Known(check_step(step, timesteps, state))
    if costs and of_owner[key].costs is None:
        with generators_kept(), put_back_later(places_of(step)):
            of_owner[key].costs = measure_costs(step, timesteps, state)
    return of_owner[key]


@dataclass
class _ChunkedLoop:
    """State shared by the chunks of one call."""

    step: TimestepFunction
    timesteps: Sequence[Any]
    collected: Collected
    modules: Sequence[nn.Module]
    places: Sequence[Place]
    left_behind: Mapping[ValueKey, bool]
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
            chunk = _Chunk(self, shape, first, inside, again)
            options = RecomputeOptions(
                preserve_rng_state=False
            )  # the chunk restores generators itself
            new_leaves = run_checkpointed(
                chunk, tuple(leaves), {}, modules=self.modules, options=options
            )
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

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        self.runs += 1
        if self.runs == 1:
            before = Generators([*leaves, *tree_leaves(self.loop.timesteps[self.first])])
            result = self._run(leaves, again=self.again)
            # Most steps draw no random numbers, and a generator state takes 5 KB.
            self.drawn_from = before if before.moved() else None
            return result

        with ExitStack() as stack:
            if self.loop.left_behind:
                stack.enter_context(put_back_later(self.loop.places, only=self.loop.left_behind))
            if self.drawn_from is not None:
                stack.enter_context(self.drawn_from.again())
            return self._run(leaves, again=True)

    def _run(self, leaves: Sequence[Any], *, again: bool) -> tuple[Any, ...]:
        state = tree_unflatten(list(leaves), self.shape)
        state = self.loop.run(state, self.first, self.inside, again=again)
        new_leaves, self.shape_after = tree_flatten(state)
        return tuple(new_leaves)
