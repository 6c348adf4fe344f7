"""Gates of timestep recompute: memory and FLOPs of chunks, the same training, hidden state.

They apply to models whose loop over time is a method `unroll(step, inputs, state, ...)` that
returns the outputs and the last state.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_snn_timesteps.py`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..core.measure import FlopCount, measure_memory
from ..primitives.snn_timesteps import TimestepFunction, check_step, slice_time
from ..primitives.snn_timesteps import checkpoint_timesteps as our_loop
from ..primitives.strategies import Apply, Sample
from ..primitives.unroll import steppers
from ..workloads.workload import Case
from .same_training import (
    PLAIN,
    build_changed,
    flops_again,
    grow_batch,
    run_forward,
    same_training,
)
from .verdict import Gate, NotApplicable, Outcome

# Takes a step, inputs, a state and what the model passes to its unroll; returns outputs and state.
Loop = Callable[..., tuple[Any, Any]]
# If the peak of even chunks is a larger share of the plain one, the saving is too small to check.
MOST_TIMESTEPS_SHARE = 0.8
# The shares of what even chunks free that another implementation has to free, and that ours has.
LEAST_SAVING_SHARE = 0.5
LEAST_SAVING_SHARE_OF_OURS = 0.95


def _check_loops(case: Case) -> int:
    """Check the steps of the loops over time of one plain forward, and return the loops' FLOPs.

    There has to be a loop. A step that keeps state outside of its modules raises `HiddenState`.
    """
    module = case.build()
    flops = list[int]()
    for stepper in steppers(module).values():

        def unroll(
            step: TimestepFunction,
            inputs: Any,
            state: Any,
            plain: Any = stepper.unroll,
            **options: Any,
        ) -> Any:
            check_step(step, slice_time(inputs, options.get("time_dim", 0)), state)
            with FlopCount() as count:
                found = plain(step, inputs, state, **options)
            flops.append(count.flops)
            return found

        stepper.unroll = unroll  # type: ignore[assignment]
    run_forward(case, module)
    if not flops:
        raise NotApplicable(
            "no module has a loop over time in a method unroll(step, inputs, state), so there is "
            "no loop to replace"
        )
    return sum(flops)


def run_in_even_chunks(
    step: TimestepFunction, inputs: Any, state: Any, *, time_dim: int = 0, **options: Any
) -> Any:
    """Run a loop over time in chunks of as many timesteps as there are chunks."""
    size = math.isqrt(len(slice_time(inputs, time_dim)))
    return our_loop(step, inputs, state, chunk_size=size, time_dim=time_dim, **options)


def _run_through(loop: Loop) -> Apply:
    """Return a strategy that runs the model's loops over time through another loop."""

    def apply(model: nn.Module, sample: Sample) -> list[str]:
        found = steppers(model)
        for stepper in found.values():
            stepper.unroll = loop  # type: ignore[assignment]
        return list(found)

    return apply


def _build_with_loop(case: Case, loop: Loop) -> nn.Module:
    """Build the model with another loop, and run it once, which may examine the loop's step."""
    module = build_changed(case, _run_through(loop))
    run_forward(case, module)
    return module


def measure_peak(case: Case, *, checkpoint_timesteps: Loop = our_loop) -> Outcome:
    """Compare the peak with that of even chunks, at a batch where activations dominate.

    Another implementation has to free half of what even chunks free.
    """
    _check_loops(case)
    case, plain = grow_batch(case, times=8)

    def peak_through(loop: Loop) -> float:
        """Return the peak as a share of the plain one."""
        memory = measure_memory(_build_with_loop(case, loop), *case.batch_and_loss)
        return memory.peak_bytes / plain.peak_bytes

    even = peak_through(run_in_even_chunks)
    if even > MOST_TIMESTEPS_SHARE:
        raise NotApplicable(
            f"the peak is {even:.0%} of plain in even chunks: there are few timesteps, or other "
            "things own the memory"
        )
    is_ours = checkpoint_timesteps is our_loop
    least_saving = LEAST_SAVING_SHARE_OF_OURS if is_ours else LEAST_SAVING_SHARE
    allowed = 1 - least_saving * (1 - even)
    peak = peak_through(checkpoint_timesteps)
    hint = ""
    if peak > allowed:
        hint = (
            "the chunks are of another size, or something is held for each timestep, such as "
            "outputs"
        )
    measured = f"peak {peak:.0%} of plain, batch {case.batch_size}"
    return measured, f"at most {allowed:.0%}, as even chunks have {even:.0%}", hint


def compare_unrolled(case: Case, *, checkpoint_timesteps: Loop = our_loop) -> Outcome:
    """Compare losses, gradients, buffers and generators of a training with those of the plain."""
    case = replace(case, blocks=None)  # the whole loop, whatever the blocks are
    _check_loops(case)
    known = _run_through(our_loop), "so few timesteps are best run in one chunk"
    return same_training(case, _run_through(checkpoint_timesteps), alone=PLAIN, known=known)


def count_timesteps(case: Case, *, checkpoint_timesteps: Loop = our_loop) -> Outcome:
    """Check that timesteps are recomputed, and each at most once; with early stop a part of it."""
    most = _check_loops(case)
    if not flops_again(case, _build_with_loop(case, our_loop))[0]:
        raise NotApplicable(
            "a step has no matrix product, convolution or attention whose FLOPs could be counted, "
            "or so few timesteps are best run in one chunk"
        )
    whole, stopped = flops_again(case, _build_with_loop(case, checkpoint_timesteps))
    hint = ""
    if not (0 < whole <= most and 0 <= stopped <= whole):
        hint = "timesteps are not recomputed exactly once: check the chunk size"
    measured = f"{whole:,} FLOPs again, {stopped:,} with early stop"
    return measured, f"more than 0, at most {most:,}", hint


GATES = (
    Gate("snn-timesteps/memory", measure_peak),
    Gate("snn-timesteps/parity", compare_unrolled),
    Gate("snn-timesteps/flops", count_timesteps),
)
