"""Gates of timestep recompute: predicted memory and FLOPs, the same training, hidden state.

They apply to models whose loop over time is a method `unroll(step, inputs, state, ...)` that
returns the outputs and the last state.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_snn_timesteps.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..core.measure import FlopCount, measure_memory
from ..primitives import snn_timesteps
from ..primitives.snn_timesteps import (
    Costs,
    HiddenState,
    TimestepFunction,
    best_chunks,
    check_step,
    detached_copies,
    slice_time,
    take_step,
)
from ..primitives.strategies import Apply, Sample
from ..primitives.unroll import steppers
from ..workloads.workload import Case
from .same_training import flops_again, large_enough, run_forward, same_training, sample_of
from .verdict import Gate, NotApplicable, Outcome

# Takes a step, inputs, a state and what the model passes to its unroll; returns outputs and state.
Loop = Callable[..., tuple[Any, Any]]
# Of the plain peak: if the predicted peak is higher, the saving is too small to check.
MOST_TIMESTEPS_SHARE = 0.8
# Of what the best chunks free: the least that those of another implementation have to free.
LEAST_SAVING_SHARE = 0.5


@dataclass(frozen=True)
class Unrolled:
    """One loop over time of a forward, and what the model passes to it."""

    step: TimestepFunction
    inputs: Any
    state: Any
    options: Mapping[str, Any]

    @property
    def timesteps(self) -> Sequence[Any]:
        return slice_time(self.inputs, self.options.get("time_dim", 0))

    def costs(self) -> Costs:
        return check_step(self.step, self.timesteps, self.state)

    def step_flops(self) -> list[int]:
        counted = []
        state = self.state
        for x in self.timesteps:
            with torch.no_grad(), FlopCount() as count:
                _, state = take_step(self.step, x, state)
            counted.append(count.flops)
        return counted


def _loops(case: Case) -> list[Unrolled]:
    """Record the loops over time of one plain forward; there has to be one."""
    module = case.build()
    found = list[Unrolled]()
    for stepper in steppers(module).values():

        def unroll(
            step: TimestepFunction,
            inputs: Any,
            state: Any,
            plain: Any = stepper.unroll,
            **options: Any,
        ) -> Any:
            own_inputs, own_state = detached_copies((inputs, state))
            found.append(Unrolled(step, own_inputs, own_state, options))
            return plain(step, inputs, state, **options)

        stepper.unroll = unroll  # type: ignore[assignment]
    run_forward(case, module)
    if not found:
        raise NotApplicable(
            "no module has a loop over time in a method unroll(step, inputs, state), so there is "
            "no loop to replace"
        )
    return found


def _through(loop: Loop) -> Apply:
    """Return a strategy that runs the model's loops over time through another loop."""

    def apply(model: nn.Module, sample: Sample) -> list[str]:
        found = steppers(model)
        for stepper in found.values():
            stepper.unroll = loop  # type: ignore[assignment]
        return list(found)

    return apply


def chunks_peak_bytes(sizes: Sequence[int], costs: Costs) -> int:
    """Return the peak held bytes: the boundaries up to a chunk, and that chunk's timesteps."""
    last = len(sizes) - 1
    return max(
        min(index + 1, last) * costs.boundary_bytes + size * costs.step_bytes
        for index, size in enumerate(sizes)
    )


def measure_peak(
    case: Case, *, checkpoint_timesteps: Loop = snn_timesteps.checkpoint_timesteps
) -> Outcome:
    """Compare the peak with its prediction, at a batch where activations dominate.

    The prediction is the state at the chunk boundaries and one chunk of timesteps. Another
    implementation has chunks of its own, and has to free half of what the predicted ones free.
    """
    _loops(case)
    case, plain = large_enough(case, times=8)
    module = case.build()
    allowed = plain.peak_bytes
    for loop in _loops(case):
        costs = loop.costs()
        num_steps = len(loop.timesteps)
        allowed -= num_steps * costs.step_bytes
        allowed += chunks_peak_bytes(best_chunks(num_steps, costs), costs)
        # A step that is being computed, and the gradient of the state.
        allowed += costs.step_bytes + costs.boundary_bytes
    allowed += sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    if case.device.type != "cpu":
        allowed += plain.peak_bytes // 20  # the allocator rounds up, and the formula counts bytes
    if allowed > MOST_TIMESTEPS_SHARE * plain.peak_bytes:
        raise NotApplicable(
            "the formula predicts a small saving here: there are few timesteps, or other things "
            "own the memory"
        )
    if checkpoint_timesteps is not snn_timesteps.checkpoint_timesteps:
        allowed = plain.peak_bytes - round(LEAST_SAVING_SHARE * (plain.peak_bytes - allowed))

    _through(checkpoint_timesteps)(module, sample_of(case))
    run_forward(case, module)  # the first call measures costs
    found = measure_memory(module, case.batch(), case.workload.mean_loss)
    hint = ""
    if found.peak_bytes > allowed:
        hint = (
            "the chunks are of another size, or something is held for each timestep, such as "
            "outputs"
        )
    measured = f"peak {found.peak_bytes / plain.peak_bytes:.0%} of plain, batch {case.batch_size}"
    return measured, f"at most {allowed / plain.peak_bytes:.0%}", hint


def compare_unrolled(
    case: Case, *, checkpoint_timesteps: Loop = snn_timesteps.checkpoint_timesteps
) -> Outcome:
    """Compare losses, gradients, buffers and generators of a training with those of the plain."""
    case = replace(case, blocks=None)  # the whole loop, whatever the blocks are
    _loops(case)
    apply = _through(checkpoint_timesteps)
    return same_training(case, apply, alone=lambda model, sample: [])


def count_timesteps(
    case: Case, *, checkpoint_timesteps: Loop = snn_timesteps.checkpoint_timesteps
) -> Outcome:
    """Compare the recomputed FLOPs with the schedule.

    Every timestep but those of the last chunk is recomputed once. With early stop the FLOPs may be
    fewer. Another implementation recomputes at most each timestep once.
    """
    expected = most = 0
    for loop in _loops(case):
        flops = loop.step_flops()
        *recomputed, _ = best_chunks(len(flops), loop.costs())
        expected += sum(flops[: sum(recomputed)])
        most += sum(flops)
    is_ours = checkpoint_timesteps is snn_timesteps.checkpoint_timesteps
    required = f"{expected:,}" if is_ours else f"more than 0, at most {most:,}"
    if not expected:
        raise NotApplicable(
            "a step has no matrix product, convolution or attention whose FLOPs could be counted, "
            "or so few timesteps are best run in one chunk"
        )

    module = case.build()
    _through(checkpoint_timesteps)(module, sample_of(case))
    run_forward(case, module)  # the first call also runs some steps to detect hidden state
    whole, stopped = flops_again(case, module)
    is_right = whole == expected if is_ours else 0 < whole <= most
    hint = ""
    if not (is_right and 0 <= stopped <= whole):
        hint = "timesteps are not recomputed exactly once: check the chunk size"
    return f"{whole:,} FLOPs again, {stopped:,} with early stop", required, hint


def check_hidden_state(case: Case) -> Outcome:
    """Check that the model's step keeps no state outside of its modules."""
    found = []
    for loop in _loops(case):
        try:
            loop.costs()
        except HiddenState as error:
            found.append(str(error))
    return f"{len(found)} loops with hidden state", "0", "; ".join(dict.fromkeys(found))


GATES = (
    Gate("snn-timesteps/memory", measure_peak),
    Gate("snn-timesteps/parity", compare_unrolled),
    Gate("snn-timesteps/flops", count_timesteps),
    Gate("snn-timesteps/hidden-state", check_hidden_state),
)
