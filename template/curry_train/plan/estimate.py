"""Estimate the bytes of a whole training step from shapes alone, by owner and by block.

    with Sketch(workload, kernels="cuda", dtype=torch.bfloat16) as sketch:
        print(sketch.step(batch_size=4).timeline.table())

This runs on a laptop for a model of any size. On the CPU the estimate equals the measured figure to
the byte. A model whose shapes depend on values is measured for real, and `Sketch.why_real` names
the operation.

Proof: `python -m pytest tests/test_estimate.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from ..core.blocks import NoBlocks, find_blocks
from ..core.fake import NEEDS_VALUES, PretendedCase, pretended
from ..core.load import load_workload
from ..core.untouched import unwatched
from ..core.workload import Case, Workload, WorkloadError
from .operation_cost import operation_cost
from .optimizer_steps import OptimizerSteps
from .optimizers import make_optimizer
from .report import ACTIVATIONS, BATCH, GRADIENTS, PARAMETERS, STATE, Timeline
from .step_lives import ASKS_FOR_DEVICE, StepLives, record_step
from .timeline import timeline_of
from .trial import needs_rehearsal, who_needs_values

Change = Callable[[nn.Module], object]


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block in a plain step."""

    held: int  # activations held after forward
    parameters: int  # all parameters
    gradients: int  # gradients of the trainable parameters
    calls: int


@dataclass(frozen=True)
class StepEstimate:
    """Estimated bytes and operation costs of one whole step."""

    timeline: Timeline
    blocks: Mapping[str, BlockBytes]
    fixed: int  # parameters, buffers, batch and optimizer state
    gradients: int  # of all trainable parameters
    head_gradients: int  # gradients that exist before the backward of the blocks starts
    rest: int  # all other bytes outside the blocks at that moment, beside the fixed ones
    head: int  # most bytes beside fixed and blocks from the last forward to the first backward
    step: int  # most bytes while the optimizer steps
    flops: Any  # of each operation of forward and backward
    moved: Any  # bytes read and written by each operation of forward and backward

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak.bytes_alive


class PricedLives(StepLives):
    """Record storages, and the FLOPs and bytes moved of each operation of forward and backward.

    With `steps`, an optimizer step that was recorded before is replayed from the record.
    """

    def __init__(self, *args: Any, steps: OptimizerSteps | None = None) -> None:
        super().__init__(*args)
        self.steps = steps
        self.flops: list[int] = []
        self.moved: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_DEVICE:
            return args[0].device
        with unwatched():
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if self.phase != "step":
                flops, moved = operation_cost(func, args, kwargs or {}, out)
                self.flops.append(flops)
                self.moved.append(moved)
        return out

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        if self.steps is None:
            super().take(optimizer)
        else:
            self.steps.take(optimizer, self)


class Sketch:
    """A workload to plan for, with modules and batches that have no values.

    Use it as a context manager, and leave the context before anything real runs. `kernels` selects
    the device whose bytes are estimated: `"cpu"`, or `"cuda"`, whose attention and norms hold other
    tensors.
    """

    def __init__(
        self,
        workload: Workload | str,
        *,
        dtype: torch.dtype = torch.float32,
        kernels: str = "cpu",
        blocks: str | None = None,
        optimizer: str | float = "adamw",
        seed: int = 0,
    ) -> None:
        self._workload = workload
        self._options: dict[str, Any] = {"dtype": dtype, "seed": seed, "blocks": blocks}
        self.kernels = kernels
        self.optimizer = optimizer
        self.why_real: str | None = None
        self._stack = contextlib.ExitStack()
        # None where the second step differs from the first one.
        self._optimizer_steps: OptimizerSteps | None = None
        self._plain: dict[tuple[int, bool], StepEstimate] = {}
        self.case: Case

    def __enter__(self) -> "Sketch":
        try:
            with self._stack as stack:
                stack.enter_context(pretended(kernels=self.kernels))
                self.case = PretendedCase(self._load(), **self._options)
                self._optimizer_steps = None if needs_rehearsal(self.case) else OptimizerSteps()
                self._stack = stack.pop_all()
        except NEEDS_VALUES as error:
            self.why_real = who_needs_values(error)
        except WorkloadError as error:
            # The wrapper around the user's code may have wrapped a NEEDS_VALUES error.
            if not isinstance(error.__cause__, NEEDS_VALUES):
                raise
            self.why_real = who_needs_values(error.__cause__)

        if self.why_real is not None:
            self._stack = contextlib.ExitStack()
            self._optimizer_steps = None
            self.case = Case(self._load(), **self._options)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def _load(self) -> Workload:
        return load_workload(self._workload) if isinstance(self._workload, str) else self._workload

    def build(self) -> nn.Module:
        return self.case.build()

    def batch(self, size: int) -> Any:
        return self.case.batch(size)

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks by name; empty if the model repeats none and no pattern is given."""
        try:
            return find_blocks(module, self.case.blocks)
        except NoBlocks:
            return {}

    def step(
        self, batch_size: int, *, accumulated: bool = False, change: Change | None = None
    ) -> StepEstimate:
        """Estimate a step at this batch size.

        `accumulated`: the last microbatch of a window, which finds the gradients of earlier ones.
        `change` modifies the model first, for example to recompute blocks; the estimate without it
        is cached.
        """
        if change is None and (batch_size, accumulated) in self._plain:
            return self._plain[batch_size, accumulated]
        steps = self._optimizer_steps
        batch = self.batch(batch_size)
        module = self.build()
        blocks = self.blocks(module)
        optimizer = make_optimizer(self.optimizer, module, foreach=self.kernels == "cuda")
        if change is not None:
            change(module)
        lives = record_step(
            module,
            batch,
            self.case.workload.mean_loss,
            optimizer=optimizer,
            blocks=list(blocks) or None,
            accumulated=accumulated,
            give_state=None if steps is None else steps.give_state,
            make=functools.partial(PricedLives, steps=steps),
        )
        found = _estimate(lives, module, blocks)
        if change is None:
            self._plain[batch_size, accumulated] = found
        return found


def _estimate(lives: StepLives, module: nn.Module, blocks: Mapping[str, nn.Module]) -> StepEstimate:
    """Derive the figures of a step from the recorded storages."""
    assert isinstance(lives, PricedLives)
    timeline = timeline_of(lives, type(module).__name__)
    length = len(lives.phases)
    forward_ends = lives.ends["forward"]

    # Changes of all bytes, and of those that blocks make in forward, at each operation.
    alive = numpy.zeros(length + 1, dtype=numpy.int64)
    of_blocks = numpy.zeros(length + 1, dtype=numpy.int64)
    fixed = 0
    held = dict.fromkeys(blocks, 0)
    last_born = 0
    first_death = lives.ends["backward"]
    for life in lives.lives:
        died = length if life.died is None else life.died
        alive[life.born] += life.nbytes
        alive[died] -= life.nbytes

        group, layer = life.owner
        if group in (PARAMETERS, STATE, BATCH) and life.born == 0 and died == length:
            fixed += life.nbytes
        if group == ACTIVATIONS and layer in held and life.born < forward_ends:
            of_blocks[life.born] += life.nbytes
            of_blocks[died] -= life.nbytes
            last_born = max(last_born, life.born)
            if died >= forward_ends:
                held[layer] += life.nbytes
                first_death = min(first_death, died)

    beside = (numpy.cumsum(alive) - numpy.cumsum(of_blocks))[:length] - fixed
    block_bytes = {
        name: BlockBytes(
            held[name],
            _bytes(block, trained=False),
            _bytes(block, trained=True),
            lives.running.calls[name],
        )
        for name, block in blocks.items()
    }
    step_totals = [
        total
        for total, phase in zip(numpy.cumsum(alive)[:length], lives.phases, strict=True)
        if phase == "step"
    ]
    head_gradients = _gradients_at(lives, first_death - 1)
    return StepEstimate(
        timeline=timeline,
        blocks=block_bytes,
        fixed=fixed,
        gradients=_bytes(module, trained=True),
        head_gradients=head_gradients,
        rest=int(beside[first_death - 1] - head_gradients),
        head=int(beside[last_born : first_death + 1].max()),
        step=int(max(step_totals)),
        flops=numpy.array(lives.flops, dtype=numpy.float64),
        moved=numpy.array(lives.moved, dtype=numpy.float64),
    )


def _gradients_at(lives: StepLives, index: int) -> int:
    """Sum the bytes of gradients that are alive after an operation."""
    return sum(
        life.nbytes
        for life in lives.lives
        if life.owner[0] == GRADIENTS
        and life.born <= index
        and (life.died is None or life.died > index)
    )


def _bytes(module: nn.Module, *, trained: bool) -> int:
    """Sum the bytes of the parameters, or of the trainable ones only."""
    return sum(
        p.numel() * p.itemsize for p in module.parameters() if p.requires_grad or not trained
    )
