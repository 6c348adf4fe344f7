"""Compare a short training with a technique to the plain one; name the blocks that differ.

    measured, required, hint = same_training(case, STRATEGIES["sac"].apply)

The training has several optimizer steps, with another microbatch in each call, so that a technique
that is right once and stale later is found. One step runs both forwards before their backward, and
one runs under autocast.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_recompute.py`.
"""

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from ..bench.steps import TrainingStep
from ..core.blocks import blocks_if_any, find_blocks
from ..core.generators import seeded
from ..core.measure import LiveStorages, Memory, count_flops, measure_memory, untouched
from ..core.measure_compiled import holds_compiled_code
from ..core.parity import (
    OUTER_BOUND,
    Parity,
    StepRecord,
    check_comparable,
    compare,
    record,
    record_step,
)
from ..core.wording import some_of
from ..primitives.strategies import STRATEGIES, Apply, Sample
from ..workloads.workload import Case, IndivisibleBatch, batch_size
from .verdict import NotApplicable, Outcome, error_in_a_line, shared

PLAIN = STRATEGIES["none"].apply
NUM_STEPS = 3
# A batch with this many held bytes is large enough for any model.
ENOUGH_BYTES = 256 * 2**20
# Microbatches of each step but the first, which has one.
NUM_MICROBATCHES = 2
# Of AdamW, whose first steps move each weight by about this much; in half precision it is higher.
LEARNING_RATE = 1e-3
LEARNING_RATE_IN_HALF = 1e-2
# The step that runs all its forwards before one backward, and the one under autocast.
JOINT_STEP = 1
AUTOCAST_STEP = 2
# Calls after which no more bytes may stay alive than before; what the first one allocates may stay.
MOST_LEAK_CALLS = 4
# Plain steps that are compared where a gate would fail. Where a step drops each of three layers
# one time in ten, 40 equal steps come once in 300,000 times, and 8 once in 12.
STEPS_TO_COMPARE = 40
# Errors of models that can't run in one of these ways.
REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError)


def sample_of(case: Case) -> Sample:
    """Make the sample that a strategy gets for a case."""
    return Sample(*case.batch_and_loss, case.blocks)


def step_of(case: Case, module: nn.Module, batch: Any = None, **options: Any) -> StepRecord:
    """Take one step of a module, by default on the batch of the case, and record it."""
    batch = case.batch() if batch is None else batch
    with seeded(case.seed):
        return record_step(module, batch, case.workload.mean_loss, **options)


def run_forward(case: Case, module: nn.Module) -> None:
    """Run a forward on the batch of the case, and leave the module as it was."""
    with untouched(module):
        case.mean_loss(module)


def grow_batch(case: Case, *, times: int) -> tuple[Case, Memory]:
    """Grow the batch until it holds so many times the parameters' bytes, or `ENOUGH_BYTES`."""
    module = case.build()
    wanted = min(times * sum(one.nbytes for one in module.parameters()), ENOUGH_BYTES)
    while True:
        plain = measure_memory(module, *case.batch_and_loss)
        if plain.held_bytes >= wanted:
            return case, plain
        growth = max(2, wanted // max(1, plain.held_bytes))
        case = replace(case, batch_size=case.batch_size * growth)


# Changes the parts of a model that its keywords name, in place: a technique, or the user's own.
Change = Callable[..., Any]


def same_training(
    case: Case,
    apply: Apply,
    *,
    alone: Apply | None = None,
    known: tuple[Apply, str] | None = None,
    same_as: Apply | None = None,
    every_block: bool = False,
) -> Outcome:
    """Check that a technique keeps losses, gradients, buffers and generators of a training.

    They must be equal bit for bit in every step if the plain training repeats bit for bit; else
    the weights stay as they are, so that each step is within the bound of one step. To find the
    blocks that break parity, `alone` is applied to one block at a time, or `apply` if it works on
    a single block. `known` is another implementation; where neither has an effect, no technique of
    its kind has one, for the reason that comes with it. `same_as` changes the plain training in a
    way that only rounds differently; the technique may equal that one too.
    `every_block`: each block that it names has to run again, if it does under torch's own
    checkpoint.
    """
    course, reference, plain = plain_training(case)
    tolerance = course.tolerance
    required = "bit-equal"
    if tolerance:
        required = f"within {tolerance:.0e}: the plain step does not repeat bit for bit"

    alone = alone or apply
    try:
        candidate, ours, names = _train(case, apply, course)
    except CheckpointError as error:
        hint = _name_blocks(case, alone, "computes other tensors the second time")
        return error_in_a_line(error), required, hint

    step, found = _find_difference(reference, candidate, tolerance)
    if same_as is not None and not found.holds:
        reference, _, _ = _train(case, same_as, course)
        step, found = _find_difference(reference, candidate, tolerance)
    if not names:
        raise NotApplicable("the strategy finds nothing worth changing")
    described = "; ".join([f"{NUM_STEPS} steps", *filter(None, course.left_out.values())])
    measured = f"{found.describe()}; {len(names)} modules, {described}"
    if not found.holds:
        measured = f"step {step + 1} of {NUM_STEPS}: {measured}"
        return measured, required, _name_blocks(case, alone, _describe_cause(found))
    left_out = _run_again_by_torch(case, ours, plain, names, course) if every_block else []
    if not ours.differs_from(plain):
        if known is not None and not _train(case, known[0], course)[1].differs_from(plain):
            raise NotApplicable(known[1])
        check_equal_steps(case)
        hint = (
            f"nothing ran twice or was freed of the {len(names)} modules to change: "
            "is the wrapper in the forward?"
        )
        return f"{measured}; it is the plain step", required, hint
    hint = ""
    if ours.growth > max(0, plain.growth):
        measured += f"; {ours.growth - plain.growth:,} bytes more stay alive after each call"
        hint = "inputs or activations are kept after backward: drop them with the graph"
    elif left_out:
        measured += f"; {len(left_out)} run as plain"
        hint = f"{', '.join(left_out[:4])} did not run again: wrap every block that is named"
    return measured, required, hint


def on_blocks(change: Change, *, keep_last: int = 0) -> Apply:
    """Return a strategy that calls `change(model, blocks=names)` with the names of the blocks.

    It leaves out so many blocks at the end, but not the only one. Every named block counts as
    changed, whatever `change` returns: one that does nothing then fails, and is not taken for a
    strategy that found nothing to do.
    """

    def apply(module: nn.Module, sample: Sample) -> list[str]:
        names = list(find_blocks(module, sample.blocks))
        names = names[: len(names) - keep_last] or names
        change(module, blocks=[*names])
        return names

    return apply


def build_changed(case: Case, apply: Apply) -> nn.Module:
    """Build the model and apply a strategy."""
    module = case.build()
    apply(module, sample_of(case))
    return module


def memory_of(case: Case, apply: Apply) -> Memory:
    """Measure a step of the model with a strategy."""
    return measure_memory(build_changed(case, apply), *case.batch_and_loss)


def flops_of_blocks(case: Case) -> int:
    """Count the FLOPs that torch's own checkpoint of each block spends again, if there are some."""
    try:
        again = flops_again(case, build_changed(case, checkpoint_by_torch))[0]
    except REFUSALS as error:
        raise NotApplicable(
            f"torch's own checkpoint of the blocks fails: {error_in_a_line(error)}"
        ) from error
    if not again:
        raise NotApplicable(
            "no matrix product, convolution or attention runs again under recompute of the blocks, "
            "so there are no FLOPs to count"
        )
    return again


def flops_again(case: Case, module: nn.Module) -> list[int]:
    """Count the FLOPs that a step of a changed module recomputes, and those with early stop."""
    found = []
    for early_stop in (False, True):
        with set_checkpoint_early_stop(early_stop):
            # The model may checkpoint by itself.
            plain = count_flops(case.build(), *case.batch_and_loss)
            found.append(count_flops(module, *case.batch_and_loss).backward - plain.backward)
    return found


def check_equal_steps(case: Case) -> None:
    """Raise `NotApplicable` if plain steps of the model differ in their FLOPs."""
    step = TrainingStep(case)
    with seeded(case.seed):
        counts = {step.count_flops() for _ in range(STEPS_TO_COMPARE)}
    if len(counts) > 1:
        raise NotApplicable(
            f"steps of this model take {min(counts):,} to {max(counts):,} FLOPs, as where "
            "layers are dropped at random, so one says nothing of the next"
        )


# The same where nothing is trained.


def same_without_training(case: Case, changes: Mapping[str, Change]) -> Outcome:
    """Compare changed blocks with the plain model in eval mode, and without gradients."""
    try:
        step, facts = _step_without_training(case, case.build())
    except Exception as error:  # the user's model may raise anything in eval mode
        why = f"in eval mode the plain model raises {error_in_a_line(error)}"
        raise NotApplicable(why) from error

    def difference(module: nn.Module) -> str:
        other_step, others = _step_without_training(case, module)
        found = compare(step, other_step)
        if not found.bit_equal:
            return f"in eval mode {found.describe(most=1)}"
        return f"with no gradients {others} in place of {facts}" if others != facts else ""

    if differs := difference(case.build()):
        raise NotApplicable(f"two steps of the plain model differ: {differs}")
    differing = [
        f"{name}: {what}"
        for name, change in changes.items()
        if (what := difference(build_changed(case, on_blocks(change))))
    ]
    hint = "be active only while module.training and torch.is_grad_enabled()" if differing else ""
    measured = "; ".join(differing) or f"{' and '.join(changes)}: nothing differs"
    return measured, "as the plain model, to the bit", hint


def _step_without_training(case: Case, module: nn.Module) -> tuple[StepRecord, str]:
    """Return a step in eval mode, and a text of the loss and the calls without gradients."""
    calls = Counter[bool]()

    def count(called: nn.Module, _: Any) -> None:
        if next(called.children(), None) is None:
            calls[torch.is_grad_enabled()] += 1

    with run_uncompiled(module):
        step = step_of(case, module.eval())
        with torch.no_grad(), register_module_forward_pre_hook(count):
            loss = case.mean_loss(module.train())
    return step, f"loss {loss.tolist()}, calls by grad mode {dict(calls)}"


def run_uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Run compiled code as it is written, because hooks fail to be traced or reached in it."""
    if holds_compiled_code(module):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


@dataclass(frozen=True)
class Activity:
    """Evidence that a technique has an effect on a training, and leaves nothing behind."""

    calls: Mapping[str, int]  # of each leaf module, in one forward and backward
    # After forward, and those that stay alive after one call more.
    held_bytes: int
    growth: int

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())

    def differs_from(self, plain: "Activity") -> bool:
        return self.num_calls > plain.num_calls or self.held_bytes < plain.held_bytes

    def calls_in(self, block: str) -> int:
        """Sum the calls inside a block, or of a block that is a leaf."""
        inside = f"{block}." if block else ""
        return sum(
            calls for name, calls in self.calls.items() if name == block or name.startswith(inside)
        )


@dataclass
class TrainingCourse:
    """The steps of the training that is compared, and what the plain model can't do in them."""

    # The steps of a special kind that run as the others, each with the reason if there is one.
    left_out: dict[int, str]
    # Of the comparison; where the plain step does not repeat itself, the weights stay as they are.
    tolerance: float = 0.0


def plain_training(case: Case) -> tuple[TrainingCourse, list[StepRecord], Activity]:
    """Train the plain model twice, and choose the course that it can follow."""
    return _train_plain(replace(case, blocks=None))


@shared
def _train_plain(case: Case) -> tuple[TrainingCourse, list[StepRecord], Activity]:
    course = TrainingCourse({} if case.dtype is torch.float32 else {AUTOCAST_STEP: ""})
    while True:
        try:
            reference, activity, _ = _train(case, PLAIN, course)
            break
        except REFUSALS as error:
            why = f"the plain model raises {type(error).__name__}"
            if JOINT_STEP not in course.left_out:
                course.left_out[JOINT_STEP] = f"without one backward of two forwards: {why}"
            elif AUTOCAST_STEP not in course.left_out:
                # One backward of two forwards is tried again.
                course.left_out = {AUTOCAST_STEP: f"without autocast: {why}"}
            else:
                raise
    # Its loss is a single number, because the first step has one microbatch.
    check_comparable(reference[0])
    again, _, _ = _train(case, PLAIN, course)
    step, found = _find_difference(reference, again, 0.0)
    if not found.bit_equal:
        if step == AUTOCAST_STEP and step not in course.left_out:
            note = "without autocast: the plain model does not repeat itself under it"
            course.left_out[step] = note
        else:
            course.tolerance = OUTER_BOUND[case.dtype]
        reference, activity, _ = _train(case, PLAIN, course)
    return course, reference, activity


def microbatch(case: Case, index: int) -> Any:
    """Make one of many microbatches; where the workload has one batch, its samples are reversed."""
    batch = replace(case, seed=case.seed + index).batch()
    if index % 2 == 0 or not case.workload.is_divisible:
        return batch
    try:
        return case.take(batch, list(range(batch_size(batch)))[::-1])
    except IndivisibleBatch:
        return batch


def _train(
    case: Case, apply: Apply, course: TrainingCourse
) -> tuple[list[StepRecord], Activity, list[str]]:
    """Train with a strategy; return a record of each step, its activity and the changed modules."""
    module = case.build()
    names = apply(module, sample_of(case))
    rate = LEARNING_RATE if case.dtype.itemsize > 2 else LEARNING_RATE_IN_HALF
    # The weights stay as they are where each step is compared with a tolerance.
    if course.tolerance:
        rate = 0.0
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, foreach=False)
    records = []
    with seeded(case.seed):
        for step in range(NUM_STEPS):
            module.zero_grad()
            records.append(record(module, _accumulate(case, module, step, course)))
            optimizer.step()
    del optimizer
    return records, activity_of(case, module), names


def _accumulate(case: Case, module: nn.Module, step: int, course: TrainingCourse) -> Tensor:
    """Run forward and backward of the microbatches of one step, and return their losses."""
    kind = None if step in course.left_out else step
    precision: Any = nullcontext()
    if kind == AUTOCAST_STEP:
        precision = torch.autocast(case.device.type, torch.bfloat16)
    is_joint = kind == JOINT_STEP
    values = []
    for index in range(NUM_MICROBATCHES if step else 1):
        batch = microbatch(case, step * NUM_MICROBATCHES + index)
        with precision:
            value = case.workload.mean_loss(module, batch)
        values.append(value)
        # A faulty technique may cut off every gradient; they are recorded as None then.
        if value.requires_grad and not is_joint:
            value.backward()
    if is_joint and (total := torch.stack(values).sum()).requires_grad:
        total.backward()
    return torch.stack([value.detach() for value in values])


def _find_difference(
    reference: Sequence[StepRecord], candidate: Sequence[StepRecord], tolerance: float
) -> tuple[int, Parity]:
    """Return the first step that differs with its comparison, or the worst that holds."""
    found = [
        compare(one, other, tolerance=tolerance)
        for one, other in zip(reference, candidate, strict=True)
    ]
    different = (pair for pair in enumerate(found) if not pair[1].holds)
    return next(different, (len(found) - 1, max(found, key=lambda parity: parity.worst)))


def checkpoint_by_torch(model: nn.Module, sample: Sample) -> list[str]:
    """Put torch's own checkpoint around each block."""
    blocks = find_blocks(model, sample.blocks)
    for block in blocks.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return [*blocks]


def _run_again_by_torch(
    case: Case, ours: Activity, plain: Activity, names: Sequence[str], course: TrainingCourse
) -> list[str]:
    """Return the blocks that run again under torch's own checkpoint alone; none where it fails.

    Raise `NotApplicable` if neither has an effect.
    """
    idle = [name for name in names if ours.calls_in(name) <= plain.calls_in(name)]
    if not idle:
        return []
    try:
        _, theirs, _ = _train(replace(case, blocks=idle), checkpoint_by_torch, course)
    except REFUSALS:
        return []
    has_effect = ours.differs_from(plain) or theirs.differs_from(plain)
    if not has_effect and all(map(theirs.calls_in, idle)):
        raise NotApplicable(
            "torch's own checkpoint of each block frees nothing and runs nothing again: name "
            "larger blocks, or leave out what checkpoints already"
        )
    return [name for name in idle if theirs.calls_in(name) > plain.calls_in(name)]


def activity_of(case: Case, module: nn.Module) -> Activity:
    """Measure what a call of a module runs and holds, and what stays after each further call.

    A technique that detaches all inputs has no backward, and holds nothing.
    """
    batch = case.batch()
    held = 0
    calls = Counter[str]()
    with (
        ExitStack() as hooks,
        untouched(module),
        seeded(case.seed),
        LiveStorages(device=case.device) as storages,
    ):
        for name, layer in module.named_modules():
            if next(layer.children(), None) is None:
                count = partial(lambda name, *_: calls.update([name]), name)
                hooks.enter_context(layer.register_forward_pre_hook(count))
        for call in range(MOST_LEAK_CALLS):
            calls.clear()
            before = storages.bytes_alive
            value = case.workload.mean_loss(module, batch)
            if value.requires_grad:
                held = storages.bytes_alive - before
                value.backward()
            del value
            module.zero_grad()
            if call > 1:
                gc.collect()
            storages.settle()
            growth = storages.bytes_alive - before
            if call and growth <= 0:
                break
    return Activity(calls, held, growth)


def _describe_cause(found: Parity) -> str:
    """Describe the likely cause of the differences."""
    kinds = {difference.kind: difference.name for difference in found.differences}
    if kinds.get("generator") in ("python", "numpy"):
        return (
            f"draws from {kinds['generator']}'s generator, which recompute does not restore: "
            "draw with torch"
        )
    if "generator" in kinds:
        return "leaves torch's generator in another state: keep preserve_rng_state=True"
    if found.without_gradient:
        return (
            "gets no gradient: an input is detached, or reentrant checkpointing gets no input "
            "that requires grad"
        )
    if "buffer" in kinds:
        return (
            f"updates buffer {kinds['buffer']} twice, or from its own last value: "
            "update it outside the block"
        )
    return (
        "computes another value the second time: it keeps state between calls, or draws random "
        "numbers of its own"
    )


def _name_blocks(case: Case, apply: Apply, cause: str) -> str:
    """Name the blocks that break parity on their own, with the cause."""
    course, reference, _ = plain_training(case)

    def differs(names: str | Sequence[str] | None, change: Apply) -> bool:
        try:
            found, _, _ = _train(replace(case, blocks=names), change, course)
        except CheckpointError:
            return True
        return not _find_difference(reference, found, OUTER_BOUND[case.dtype])[1].holds

    # There are none where the technique changed something outside of blocks.
    names = list(blocks_if_any(case.build(), case.blocks))
    guilty = [name for name in names if differs(name, apply)]
    blocks = some_of(guilty)
    if len(guilty) > 1:
        blocks = f"each of {blocks}"
    hint = f"{blocks or 'the recomputed part'} {cause}"
    if names and not differs(case.blocks, checkpoint_by_torch):
        return f"{hint}; torch's own checkpoint of these blocks is right: look at the technique"
    return f"{hint}; or leave it out with --blocks"
