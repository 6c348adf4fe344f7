"""Compare a step with a technique to a plain step, and name the blocks that differ.

    same_training("sac/parity", case, STRATEGIES["sac"].apply)

Proof: `python -m pytest tests/gates/test_recompute.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from ..core.blocks import NoBlocks, find_blocks
from ..core.measure import LiveStorages, Loss
from ..core.parity import (
    OUTER_BOUND,
    Parity,
    StepRecord,
    check_comparable,
    compare,
    record_step,
)
from ..core.rerun import seeded, untouched
from ..primitives.strategies import Apply, Sample
from ..workloads.workload import Case
from .verdict import Implementation, Verdict, as_ours, not_applicable


def sample_of(case: Case) -> Sample:
    """Make the sample that a strategy gets for a case."""
    return Sample(case.batch(), case.workload.mean_loss, case.blocks)


def same_training(
    gate: str,
    case: Case,
    apply: Apply,
    *,
    alone: Apply | None = None,
    by_block: bool = False,
    can_leave_out: bool = True,
) -> Verdict:
    """Check that a technique keeps loss, gradients, buffers and random generators of a step.

    They must be equal bit for bit if the plain step repeats bit for bit. To find the blocks that
    break parity, `alone` is applied to one block at a time, or `apply` if it works on a single
    block. `by_block`: the technique recomputes each block by itself, so it may do nothing where
    torch's own checkpoint would do nothing. `can_leave_out`: `--blocks` can leave out a block that
    breaks parity, which the hint then says.
    """
    otherwise = "; or leave it out with --blocks" if can_leave_out else ""
    reference, plain, _ = _step(case, lambda module, sample: [])
    check_comparable(reference)
    again, _, _ = _step(case, lambda module, sample: [])
    repeats = compare(reference, again).bit_equal
    tolerance = 0.0 if repeats else OUTER_BOUND[case.dtype]
    required = (
        "bit-equal"
        if repeats
        else f"within {tolerance:.0e}: the plain step does not repeat bit for bit"
    )
    try:
        candidate, ours, names = _step(case, apply)
    except CheckpointError as error:
        measured = f"CheckpointError: {str(error).splitlines()[0]}"
        hint = _where(case, alone or apply, "computes other tensors the second time") + otherwise
        return Verdict(gate, False, measured, required, hint)

    found = compare(reference, candidate, tolerance=tolerance)
    if not names:
        return not_applicable(
            gate, required=required, why="the strategy finds nothing worth changing"
        )
    hint = "" if found.holds else _where(case, alone or apply, _cause(found)) + otherwise
    if not hint and not ours.differs_from(plain):
        if by_block and not _torch_does_something(case, plain):
            why = (
                "torch's own checkpoint of each block frees nothing and runs nothing again, "
                "as with lone layers: name larger blocks"
            )
            return not_applicable(gate, required=required, why=why)
        hint = (
            f"nothing ran twice or was freed, though {len(names)} modules changed: "
            "is the wrapper in the forward?"
        )
    return Verdict(gate, not hint, f"{found.describe()}; {len(names)} modules", required, hint)


def in_place(*arguments: Any, errors: Sequence[type[Exception]] = ()) -> Callable[..., Apply]:
    """Return an adapter from `function(module, *arguments, blocks=names)` to a strategy.

    Every named block counts as changed, whatever the function returns: one that does nothing is
    then a fault, and not a strategy that found nothing to do.
    """

    def adapt(given: Implementation, present: Any) -> Apply:
        call = as_ours(given.value, *errors)

        def apply(module: nn.Module, sample: Sample) -> list[str]:
            names = list(find_blocks(module, sample.blocks))
            call(module, *arguments, blocks=names)
            return names

        return apply

    return adapt


@contextmanager
def calls_counted(module: nn.Module) -> Iterator[list[int]]:
    """Count the calls of all leaf modules, inside the blocks and outside."""
    counted = [0]

    def count(*_: Any) -> None:
        counted[0] += 1

    leaves = [layer for layer in module.modules() if next(layer.children(), None) is None]
    handles = [layer.register_forward_pre_hook(count) for layer in leaves]
    try:
        yield counted
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Activity:
    """Evidence that a technique has an effect on a step."""

    calls: int  # of leaf modules
    held_bytes: int  # after forward

    def differs_from(self, plain: "Activity") -> bool:
        return self.calls > plain.calls or self.held_bytes < plain.held_bytes


def _step(case: Case, apply: Apply) -> tuple[StepRecord, Activity, list[str]]:
    """Run one step with a strategy; return its results, its activity and the changed modules."""
    module = case.build()
    batch = case.batch()
    loss = case.workload.mean_loss
    names = apply(module, sample_of(case))
    with seeded(case.seed), calls_counted(module) as calls:
        step = record_step(module, batch, loss)
    return step, Activity(calls[0], _held_bytes(module, batch, loss)), names


def _torch_does_something(case: Case, plain: Activity) -> bool:
    """Check whether torch's own checkpoint of each block has an effect, or cannot be tested.

    It cannot be tested if there are no blocks, if a block does not run, or if the checkpoint fails.
    """
    running: set[str] = set()

    def around(module: nn.Module, sample: Sample) -> list[str]:
        blocks = find_blocks(module, sample.blocks)
        for name, block in blocks.items():

            def forward(
                *args: Any, own: Any = block.forward, name: str = name, **kwargs: Any
            ) -> Any:
                running.add(name)
                return checkpoint(own, *args, use_reentrant=False, **kwargs)

            block.forward = forward
        return list(blocks)

    try:
        _, theirs, names = _step(case, around)
    except (NoBlocks, CheckpointError):
        return True
    return theirs.differs_from(plain) or running != set(names)


def _held_bytes(module: nn.Module, batch: Any, loss: Loss) -> int:
    """Return the bytes held after forward; a technique that detaches all inputs has no backward."""
    with untouched(module), LiveStorages() as storages:
        value = loss(module, batch)
        return storages.bytes_alive if value.requires_grad else 0


def _cause(found: Parity) -> str:
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


def _where(case: Case, apply: Apply, cause: str) -> str:
    """Name the blocks that break parity on their own, with the cause."""
    reference, _, _ = _step(case, lambda module, sample: [])
    guilty = []
    try:
        names = list(find_blocks(case.build(), case.blocks))
    except NoBlocks:  # the technique changed something outside of blocks
        names = []
    for name in names:
        try:
            alone, _, _ = _step(replace(case, blocks=name), apply)
            if not compare(reference, alone, tolerance=OUTER_BOUND[case.dtype]).holds:
                guilty.append(name)
        except CheckpointError:
            guilty.append(name)
    blocks = ", ".join(guilty[:4])
    if len(guilty) > 4:
        blocks += f" and {len(guilty) - 4} more"
    return f"{blocks or 'the recomputed part'} {cause}"
