"""The bytes of a whole training step, by owner and by block, from shapes alone: on a laptop, for any size of model.

    with Sketch(workload, kernels="cuda", dtype=torch.bfloat16) as sketch:
        print(sketch.step(batch_size=4).timeline.table())

On the CPU this is the measured figure to the byte. A model whose shapes depend on values is measured for real, and
`Sketch.why_real` says where. Proof: `python -m pytest tests/test_estimate.py`.
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
    """Of one block in a step as it is: what it holds after forward, and its trainable parameters."""

    held: int
    parameters: int
    gradients: int
    calls: int


@dataclass(frozen=True)
class StepEstimate:
    """`fixed`: parameters, buffers, batch and optimizer state. `head_gradients`: those that are there before the blocks
    are in backward; `rest`: what else stays beside the blocks meanwhile; `head`: the most beside fixed and blocks
    between the last block's forward and its backward; `step`: the most while the optimizer steps. `flops` and `moved`
    have a figure for each operation of forward and backward.
    """

    timeline: Timeline
    blocks: Mapping[str, BlockBytes]
    fixed: int
    gradients: int
    head_gradients: int
    rest: int
    head: int
    step: int
    flops: Any
    moved: Any

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak.bytes_alive


class PricedLives(StepLives):
    """Also what each operation computes and how many bytes it reads and writes. With `steps` that of the optimizer is
    recorded once."""

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
    """A workload to plan for: its modules and batches without values. A context, which ends before anything real runs.

    `kernels` says which device's the bytes are: `"cpu"`, or `"cuda"` for what its attention and norms keep.
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
        self.kernels, self.optimizer = kernels, optimizer
        self.why_real: str | None = None
        self._stack = contextlib.ExitStack()
        self._optimizer_steps: OptimizerSteps | None = (
            None  # where the second step is as the first one
        )
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
        except WorkloadError as error:  # told by whoever called the user's code
            if not isinstance(error.__cause__, NEEDS_VALUES):
                raise
            self.why_real = who_needs_values(error.__cause__)
        if self.why_real is not None:
            self._stack, self._optimizer_steps = contextlib.ExitStack(), None
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
        """None where the model repeats none and no pattern names some."""
        try:
            return find_blocks(module, self.case.blocks)
        except NoBlocks:
            return {}

    def step(
        self, batch_size: int, *, accumulated: bool = False, change: Change | None = None
    ) -> StepEstimate:
        """A step at this batch size; `accumulated`: the last microstep of several. `change` may recompute blocks;
        without it a step is estimated once."""
        if change is None and (batch_size, accumulated) in self._plain:
            return self._plain[batch_size, accumulated]
        steps, batch = self._optimizer_steps, self.batch(batch_size)
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
    assert isinstance(lives, PricedLives)
    timeline, length = timeline_of(lives, type(module).__name__), len(lives.phases)
    alive, of_blocks = (
        numpy.zeros(length + 1, dtype=numpy.int64),
        numpy.zeros(length + 1, dtype=numpy.int64),
    )
    forward_ends, fixed = lives.ends["forward"], 0
    held, last_born, first_death = dict.fromkeys(blocks, 0), 0, lives.ends["backward"]
    for life in lives.lives:
        died = length if life.died is None else life.died
        alive[life.born] += life.nbytes
        alive[died] -= life.nbytes
        group, layer = life.owner
        fixed += (
            life.nbytes
            if group in (PARAMETERS, STATE, BATCH) and life.born == 0 and died == length
            else 0
        )
        if group == ACTIVATIONS and layer in held and life.born < forward_ends:
            of_blocks[life.born] += life.nbytes
            of_blocks[died] -= life.nbytes
            last_born = max(last_born, life.born)
            if died >= forward_ends:
                held[layer] += life.nbytes
                first_death = min(first_death, died)
    beside = (numpy.cumsum(alive) - numpy.cumsum(of_blocks))[:length] - fixed
    found = {
        name: BlockBytes(
            held[name],
            _bytes(block, trained=False),
            _bytes(block, trained=True),
            lives.running.calls[name],
        )
        for name, block in blocks.items()
    }
    step = [
        total
        for total, phase in zip(numpy.cumsum(alive)[:length], lives.phases, strict=True)
        if phase == "step"
    ]
    return StepEstimate(
        timeline=timeline,
        blocks=found,
        fixed=fixed,
        gradients=_bytes(module, trained=True),
        head_gradients=_gradients_at(lives, first_death - 1),
        rest=int(beside[first_death - 1] - _gradients_at(lives, first_death - 1)),
        head=int(beside[last_born : first_death + 1].max()),
        step=int(max(step)),
        flops=numpy.array(lives.flops, dtype=numpy.float64),
        moved=numpy.array(lives.moved, dtype=numpy.float64),
    )


def _gradients_at(lives: StepLives, index: int) -> int:
    return sum(
        life.nbytes
        for life in lives.lives
        if life.owner[0] == GRADIENTS
        and life.born <= index
        and (life.died is None or life.died > index)
    )


def _bytes(module: nn.Module, *, trained: bool) -> int:
    return sum(
        p.numel() * p.itemsize for p in module.parameters() if p.requires_grad or not trained
    )
