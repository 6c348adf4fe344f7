"""Gates of timestep recompute: predicted memory and FLOPs, the same training, hidden state.

They apply to models whose loop over time is a method `unroll(step, inputs, state, ...)` that
returns the outputs and the last state.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_snn_timesteps.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..core.generators import seeded, untouched
from ..core.measure import FlopCount, Memory, count_flops, measure_memory, recompute_flops
from ..primitives import snn_timesteps
from ..primitives.rerun import modules_of
from ..primitives.snn_timesteps import (
    Costs,
    HiddenState,
    TimestepFunction,
    best_chunks,
    check_step,
    slice_time,
    steppers,
    take_step,
)
from ..primitives.strategies import Apply, Sample
from ..workloads.workload import Case
from .same_training import bit_difference, same_training, sample_of
from .verdict import Gate, NotApplicable, Verdict, not_applicable

# Takes a step, inputs, a state and what the model passes to its unroll; returns outputs and state.
Loop = Callable[..., tuple[Any, Any]]
# Of the plain peak: if the predicted peak is higher, the saving is too small to check.
MOST_TIMESTEPS_SHARE = 0.8
# Of what the best chunks free: the least that those of another implementation have to free.
LEAST_SAVING_SHARE = 0.5
ENOUGH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Unrolled:
    """One loop over time of a forward, and what the model passes to it."""

    unroll: Loop
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
            own_inputs, own_state = _detached((inputs, state))
            found.append(Unrolled(plain, step, own_inputs, own_state, options))
            return plain(step, inputs, state, **options)

        stepper.unroll = unroll  # type: ignore[assignment]
    with seeded(case.seed), untouched(module):
        case.workload.mean_loss(module, case.batch())
    if not found:
        why = (
            "no module has a loop over time in a method unroll(step, inputs, state), so there is "
            "no loop to replace"
        )
        raise NotApplicable(why, required="a loop over time")
    return found


def _detached(values: Any, *, train: bool = False) -> Any:
    """Return copies of all tensors; with `train`, those in floating point require a gradient."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(train and leaf.is_floating_point())

    return tree_map(copy, values)


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
) -> Verdict:
    """Compare the peak with its prediction, at a batch where activations dominate.

    The prediction is the state at the chunk boundaries and one chunk of timesteps. Another
    implementation has chunks of its own, and has to free half of what the predicted ones free.
    """
    gate = "snn-timesteps/memory"
    case = replace(case, blocks=None)  # the whole loop, whatever the blocks are
    _loops(case)
    case, plain = _large_enough(case)
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
        why = (
            "the formula predicts a small saving here: there are few timesteps, or other things "
            "own the memory"
        )
        required = f"peak at most {allowed / plain.peak_bytes:.0%} of plain"
        return not_applicable(gate, required=required, why=why)
    if checkpoint_timesteps is not snn_timesteps.checkpoint_timesteps:
        allowed = plain.peak_bytes - round(LEAST_SAVING_SHARE * (plain.peak_bytes - allowed))

    _through(checkpoint_timesteps)(module, sample_of(case))
    loss = case.workload.mean_loss
    batch = case.batch()
    with untouched(module):
        loss(module, batch)  # the first call measures costs
    found = measure_memory(module, batch, loss)
    hint = ""
    if found.peak_bytes > allowed:
        hint = (
            "the chunks are of another size, or something is held for each timestep, such as "
            "outputs"
        )
    measured = f"peak {found.peak_bytes / plain.peak_bytes:.0%} of plain, batch {case.batch_size}"
    required = f"at most {allowed / plain.peak_bytes:.0%}"
    return Verdict(gate, not hint, measured, required, hint)


def _large_enough(case: Case) -> tuple[Case, Memory]:
    """Grow the batch until it holds eight times the parameters' bytes, or `ENOUGH_BYTES`."""
    module = case.build()
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    while True:
        plain = measure_memory(module, case.batch(), case.workload.mean_loss)
        if plain.held_bytes >= (wanted := min(8 * parameters, ENOUGH_BYTES)):
            return case, plain
        case = replace(
            case, batch_size=case.batch_size * max(2, wanted // max(1, plain.held_bytes))
        )


def compare_unrolled(
    case: Case, *, checkpoint_timesteps: Loop = snn_timesteps.checkpoint_timesteps
) -> Verdict:
    """Compare losses, gradients, buffers and generators of a training with those of the plain."""
    case = replace(case, blocks=None)
    _loops(case)
    apply = _through(checkpoint_timesteps)
    gate = "snn-timesteps/parity"
    return same_training(gate, case, apply, alone=lambda model, sample: [])


def count_timesteps(
    case: Case, *, checkpoint_timesteps: Loop = snn_timesteps.checkpoint_timesteps
) -> Verdict:
    """Compare the recomputed FLOPs with the schedule.

    Every timestep but those of the last chunk is recomputed once. With early stop the FLOPs may be
    fewer. Another implementation recomputes at most each timestep once.
    """
    gate = "snn-timesteps/flops"
    case = replace(case, blocks=None)
    expected = most = 0
    for loop in _loops(case):
        flops = loop.step_flops()
        *recomputed, _ = best_chunks(len(flops), loop.costs())
        expected += sum(flops[: sum(recomputed)])
        most += sum(flops)
    is_ours = checkpoint_timesteps is snn_timesteps.checkpoint_timesteps
    required = f"{expected:,}" if is_ours else f"more than 0, at most {most:,}"
    if not expected:
        why = (
            "a step has no matrix product, convolution or attention whose FLOPs could be counted, "
            "or so few timesteps are best run in one chunk"
        )
        return not_applicable(gate, required=required, why=why)

    loss = case.workload.mean_loss
    batch = case.batch()
    module = case.build()
    plain = count_flops(case.build(), batch, loss)
    _through(checkpoint_timesteps)(module, sample_of(case))
    with untouched(module):
        loss(module, batch)  # the first call also runs some steps to detect hidden state
    with set_checkpoint_early_stop(False):
        whole = recompute_flops(plain, count_flops(module, batch, loss))
    stopped = recompute_flops(plain, count_flops(module, batch, loss))
    is_right = whole == expected if is_ours else 0 < whole <= most
    hint = ""
    if not (is_right and 0 <= stopped <= whole):
        hint = "timesteps are not recomputed exactly once: check the chunk size"
    measured = f"{whole:,} FLOPs again, {stopped:,} with early stop"
    return Verdict(gate, not hint, measured, required, hint)


def compare_outputs(
    case: Case, *, checkpoint_timesteps: Loop = snn_timesteps.checkpoint_timesteps
) -> Verdict:
    """Compare outputs, last state and gradients of each loop with those of the model's own."""
    gate = "snn-timesteps/outputs"
    required = "bit-equal to the model's own loop"
    wrong = []
    num_loops = 0
    for loop in _loops(case):
        plain = _results(loop, loop.unroll, case.seed)
        if bit_difference(_results(loop, loop.unroll, case.seed), plain):
            why = "the model's own loop does not repeat itself bit for bit"
            return not_applicable(gate, required=required, why=why)
        num_loops += 1
        if differs := bit_difference(_results(loop, checkpoint_timesteps, case.seed), plain):
            wrong.append(differs)
    measured = f"{num_loops - len(wrong)} of {num_loops} loops bit-equal"
    hint = ""
    if wrong:
        hint = f"collect outputs in the order of time, and return the last state; {wrong[0]}"
    return Verdict(gate, not wrong, measured, required, hint)


def _results(loop: Unrolled, run: Loop, seed: int) -> dict[str, list[Any]]:
    """Run a loop and its backward; return its outputs, last state and gradients."""
    inputs, state = _detached((loop.inputs, loop.state), train=True)
    with seeded(seed):
        outputs, last = run(loop.step, inputs, state, **loop.options)
    # Another factor for each number, so that none may take another's place.
    total = sum(
        (leaf * torch.arange(1, leaf.numel() + 1).to(leaf).reshape(leaf.shape)).sum()
        for leaf in tree_leaves((outputs, last))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )
    leaves = [leaf for leaf in tree_leaves((inputs, state)) if isinstance(leaf, Tensor)]
    leaves += [one for module in modules_of(loop.step, depth=3) for one in module.parameters()]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Sequence[Any] = ()
    if isinstance(total, Tensor):
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    found = {"outputs": outputs, "state": last, "gradients": list(gradients)}
    return {name: tree_leaves(_detached(value)) for name, value in found.items()}


def check_hidden_state(case: Case) -> Verdict:
    """Check that the model's step keeps no state outside of its modules."""
    gate = "snn-timesteps/hidden-state"
    found = []
    for loop in _loops(case):
        try:
            check_step(loop.step, loop.timesteps, loop.state)
        except HiddenState as error:
            found.append(str(error))
    measured = f"{len(found)} loops with hidden state"
    return Verdict(gate, not found, measured, "0", "; ".join(dict.fromkeys(found)))


GATES = (
    Gate("snn-timesteps/memory", measure_peak),
    Gate("snn-timesteps/parity", compare_unrolled),
    Gate("snn-timesteps/flops", count_timesteps),
    Gate("snn-timesteps/outputs", compare_outputs),
    Gate("snn-timesteps/hidden-state", check_hidden_state),
)
