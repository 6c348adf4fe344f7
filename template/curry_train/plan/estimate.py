"""Estimate a whole training step on shapes alone, optimizer included.

    with Sketch(workload, kernels="cuda", dtype=torch.bfloat16) as sketch:
        print(sketch.step(batch_size=4).timeline.table())

This runs on a laptop for a model of any size. On the CPU the estimate equals the measured figure to
the byte. A model whose shapes depend on values is measured for real, and `Sketch.why_real` names
the operation.

Proof: `python -m pytest tests/plan`.
"""

import contextlib
import gc
import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..core.blocks import NoBlocks, blocks_if_any
from ..core.generators import seeded, unwatched
from ..core.measure import REST_LAYER, LiveStorages, heap_kept, local_tensors
from ..primitives.running_blocks import BlockChoice
from ..workloads.models import load_workload
from ..workloads.workload import Case, Workload, WorkloadError
from .cuda_step import StepTrace, trace_of
from .device import DeviceProfile
from .optimizers import OptimizerFactory, make_optimizer, take_eagerly
from .parallel import Sharding
from .profiler import (
    ACTIVATIONS_GROUP,
    BATCH_GROUP,
    OPTIMIZER_STATE_GROUP,
    PARAMETERS_GROUP,
    Timeline,
    trained_parameters,
)
from .rank_step import (
    FROM_SHAPES_ALONE,
    EvenRouting,
    RankKernels,
    RankProgram,
    one_rank,
    record_rank_step,
)
from .rank_time import Links, RankSeconds, StepCourse, time_of_course
from .record import LayerFigures, OptimizerState, StepLives
from .shapes import (
    LARGEST_DRAW,
    NEEDS_VALUES_ERRORS,
    SMALLEST_DRAW,
    EveryLayerRuns,
    NeedsValues,
    PretendedCase,
    host_note,
    is_subclass_refusal,
    pretended,
    who_needs_values,
)
from .timeline import record_step_storages, timeline_of

# Trial step: check whether a training step can be estimated from shapes alone.

KERNEL_SIZES_REASON = "the sizes of the tensors that its kernel makes do not follow from shapes"
SPARSE_SIZES_REASON = "the number of values in a sparse tensor does not follow from shapes"
KERNEL_SIZED_OPERATIONS = (torch.ops.aten.col2im.default, torch.ops.aten._embedding_bag.default)
TRIAL_BATCH_SIZE = 2  # batch norm needs two


def trial_size(case: Case, size: int = TRIAL_BATCH_SIZE) -> int:
    """Return the size of a small batch: all rows where they can't be divided."""
    return size if case.workload.is_divisible else case.workload.own_batch or size


def needs_rehearsal(case: Case) -> bool:
    """Check whether the second step may differ from the first one, so that both must run.

    It may differ if forward and backward leave tensors behind (a cache, or a buffer that is
    assigned), if a trainable parameter gets no gradient, or if Python's random numbers are drawn.
    Raises one of `NEEDS_VALUES` if shapes are not enough.
    """
    module = case.build()
    batch = case.batch(trial_size(case))
    with seeded(0), torch.enable_grad(), CheckedStorages() as trial:
        before = random.getstate()
        loss = case.workload.mean_loss(module, batch)
        if loss.requires_grad:
            loss.sum().backward()
        del loss
        drawn = random.getstate() != before

    unused = any(one.requires_grad and one.grad is None for one in module.parameters())
    module.zero_grad(set_to_none=True)
    gc.collect()
    return drawn or unused or trial.bytes_alive > 0


def held_by_forward(case: Case, module: nn.Module, batch: Any) -> int:
    """Return the bytes that a forward makes and holds for the backward."""
    with seeded(0), torch.enable_grad(), LiveStorages() as storages:
        loss = case.workload.mean_loss(module, batch)
        held = storages.bytes_alive
    del loss
    return held


def _let_layers_run(case: Case, draws: EveryLayerRuns) -> None:
    """Choose the value of single uniform draws with which the forward holds most memory."""
    held = {}
    for value in (LARGEST_DRAW, SMALLEST_DRAW):
        draws.value = value
        held[value] = held_by_forward(case, case.build(), case.batch(trial_size(case)))
    draws.value = max(held, key=held.__getitem__)


class CheckedStorages(LiveStorages):
    """Raise an error at operations whose real storages differ from those that shapes give."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        with unwatched():
            if func in KERNEL_SIZED_OPERATIONS:
                raise NeedsValues(func, KERNEL_SIZES_REASON)
            sparse = func is torch.ops.aten.embedding.default and len(args) > 4 and args[4]
            if sparse or any(
                isinstance(value, Tensor) and value.layout is not torch.strided for value in args
            ):
                raise NeedsValues(func, SPARSE_SIZES_REASON)
            return super().run(func, args, kwargs)


# Estimate the bytes of a whole training step from shapes alone, by owner and by block.

ModelChange = Callable[[nn.Module], object]
FIXED_GROUPS = (PARAMETERS_GROUP, OPTIMIZER_STATE_GROUP, BATCH_GROUP)


@dataclass(frozen=True, eq=False)
class StepEstimate:
    """Estimated bytes and operation costs of one whole step."""

    timeline: Timeline
    blocks: Mapping[str, LayerFigures]
    fixed: int  # parameters, buffers, batch and optimizer state
    gradients: int  # of all trainable parameters
    head: int  # most bytes alive before the backward of the first block
    tail: int  # most bytes alive after the backward of the last block, as in the optimizer step
    flops: Any  # of each operation of forward and backward
    moved: Any  # bytes read and written by each operation of forward and backward
    dtype: str  # in which it computes: that of the parameters, or of FSDP2's policy
    trace: StepTrace | None  # of a step on CUDA, for the model of its allocator
    course: StepCourse | None  # of a rank: when it waits for collectives
    # Of a rank: a microbatch before the last of a window.
    middle_bytes: int = 0
    middle_course: StepCourse | None = None

    @property
    def peak_bytes(self) -> int:
        return max(self.timeline.peak.bytes_alive, self.middle_bytes)


class Sketch:
    """A workload to plan for, with modules and batches that have no values.

    Use it as a context manager, and leave the context before anything real runs. `kernels` selects
    the device whose bytes are estimated: `"cpu"`, or `"cuda"`, whose attention and norms hold other
    tensors. With `sharding`, a step is that of one of its ranks, in the user's own wrapping.
    """

    def __init__(
        self,
        workload: Workload | str,
        *,
        dtype: torch.dtype | None = None,
        kernels: str = "cpu",
        blocks: str | Sequence[str] | None = None,
        optimizer: str | float | OptimizerFactory | None = None,
        seed: int = 0,
        sharding: Sharding | None = None,
    ) -> None:
        self._workload = workload
        self._optimizer = optimizer
        self._options: dict[str, Any] = {"dtype": dtype, "seed": seed, "blocks": blocks}
        self.kernels = kernels
        self.why_real: str | None = None
        self.host_note: str | None = None
        self.draws = EveryLayerRuns()
        self._stack = contextlib.ExitStack()
        # None where the second step differs from the first one.
        self._state: OptimizerState | None = None
        self.sharding = sharding or Sharding()
        # The mesh of a sharding over several ranks.
        self._mesh: Any = None
        self.case: Case
        # None for a model without blocks.
        self.choice: BlockChoice | None = None

    @property
    def own_global_batch(self) -> int:
        """Return the samples of an optimizer step as the workload makes them, or 1."""
        workload = self.case.workload
        return (workload.own_batch or 1) * workload.accumulation

    def __enter__(self) -> "Sketch":
        sharding = self.sharding
        try:
            with self._stack as stack:
                enter = stack.enter_context
                enter(heap_kept())
                mode = None
                if sharding.is_shared:
                    self._mesh = enter(one_rank(sharding.mesh, rank=sharding.rank))
                    mode = RankKernels(kernels=self.kernels)
                active = enter(pretended(mode=mode, kernels=self.kernels))
                self.case = PretendedCase(load_workload(self._workload), **self._options)
                module = self.build()
                if sharding.is_shared:
                    # Imported here because a plan of one rank forces no routing.
                    from ..primitives.routing import has_router

                    if has_router(module):
                        enter(EvenRouting())
                enter(self.draws)
                if not needs_rehearsal(self.case):
                    self._state = OptimizerState(active.values)
                self._try_optimizer(module)
                self._settle_blocks()
                self._stack = stack.pop_all()
        except (RuntimeError, WorkloadError, *NEEDS_VALUES_ERRORS) as error:
            # The wrapper around the user's code may have wrapped the error.
            cause = error.__cause__ if isinstance(error, WorkloadError) else error
            if not isinstance(cause, NEEDS_VALUES_ERRORS) and not is_subclass_refusal(cause):
                raise
            assert cause is not None
            self.why_real = who_needs_values(cause)

        if self.why_real is not None:
            if sharding.is_shared:
                raise ValueError(FROM_SHAPES_ALONE.format(self.why_real))
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(heap_kept())
            self._state = None
            self.case = Case(load_workload(self._workload), **self._options)
            self._stack.enter_context(self.draws)
            self._settle_blocks()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def _try_optimizer(self, module: nn.Module) -> None:
        """Take a step without values; raises one of `NEEDS_VALUES_ERRORS` if it needs them."""
        optimizer = make_optimizer(self.optimizer, module, foreach=self.kernels == "cuda")
        self.host_note = host_note(optimizer)
        if self._state is not None:
            self._state.give_state(optimizer)
            return
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        take_eagerly(optimizer)

    def _settle_blocks(self) -> None:
        """Let all layers run, and choose the blocks by one forward of a small batch."""
        if self.draws.drawn:
            _let_layers_run(self.case, self.draws)
        sized = replace(self.case, batch_size=trial_size(self.case, self.case.batch_size))
        with contextlib.suppress(NoBlocks):
            chosen, self.choice = sized.with_running_blocks()
            self.case = replace(self.case, blocks=chosen.blocks)

    @property
    def optimizer(self) -> str | float | OptimizerFactory:
        """The optimizer that was given, or the workload's own, or AdamW."""
        if self._optimizer is not None:
            return self._optimizer
        return self.case.workload.optimizer or "adamw"

    @property
    def dtype_name(self) -> str:
        return str(self.case.dtype).removeprefix("torch.")

    def build(self) -> nn.Module:
        return self.case.build()

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks by name; empty if the model repeats none and no pattern is given."""
        return blocks_if_any(module, self.case.blocks)

    def step(
        self,
        batch_size: int,
        *,
        accumulated: bool = False,
        change: ModelChange | None = None,
        alone: bool = False,
    ) -> StepEstimate:
        """Estimate a step at this batch size.

        `accumulated`: the last microbatch of a window, which finds the gradients of earlier ones.
        `change` modifies the model first, for example to recompute blocks. `alone`: of the model
        without the sharding.
        """
        is_shared = self.sharding.is_shared and not alone
        workload = self.case.workload
        blocks: list[str] = []

        def make_program(record: contextlib.AbstractContextManager[Any]) -> RankProgram:
            batch = self.case.batch(batch_size)
            module = called = self.build()
            names = [*self.blocks(module)]
            # FSDP2 shards the blocks that the model repeats, as the trainer of a project does,
            # whichever of them a plan works on.
            units = [*blocks_if_any(module, self._options["blocks"])] or names
            if change is not None:
                change(module)
            if is_shared:
                with record:
                    called = self.sharding.parallelize(
                        module,
                        self._mesh,
                        blocks=map(module.get_submodule, units),
                        own=workload.parallelize,
                    )
            # A way of the user's own may leave experts to other ranks.
            there = dict(module.named_modules())
            blocks.extend(name for name in names if name in there)
            optimizer = make_optimizer(self.optimizer, module, foreach=self.kernels == "cuda")
            return RankProgram(module, called, batch, optimizer)

        options: dict[str, Any] = {
            "state": self._state,
            "accumulated": accumulated,
            "keeps_output": self.kernels == "cuda" and workload.output_until != "loss",
        }
        if not is_shared:
            program = make_program(contextlib.nullcontext())
            lives = record_step_storages(
                program.module,
                program.batch,
                workload.mean_loss,
                optimizer=program.optimizer,
                blocks=blocks or None,
                **options,
            )
            return _estimate(lives, blocks, self)
        lives, middle = record_rank_step(
            make_program,
            workload.mean_loss,
            blocks=blocks,
            syncs_each=self.sharding.sync_each_microbatch,
            **options,
        )
        found = _estimate(lives, blocks, self)
        if middle is None:
            return found
        return replace(found, middle_bytes=middle.bytes_peak, middle_course=middle.course)


def _estimate(lives: StepLives, blocks: Collection[str], sketch: Sketch) -> StepEstimate:
    """Derive the figures of a step from the recorded storages, with its trace if it is on CUDA."""
    length = len(lives.phases)
    forward_ends = lives.ends["forward"]
    found = {name: lives.figures[name] for name in blocks}
    fixed = 0
    for life in lives.lives:
        died = length if life.died is None else life.died
        group, layer = life.owner
        if group in FIXED_GROUPS and life.born == 0 and died == length:
            fixed += life.nbytes
        layer = lives.running.holders.get(life, layer)
        if group == ACTIVATIONS_GROUP and layer in found and life.born < forward_ends <= died:
            found[layer].held += life.nbytes

    totals: Any = sum(lives.curves.values())
    # The backward of a block lasts until that of another one; forward has a point at its end.
    begins = sorted(
        (place + 1, name)
        for name, block in found.items()
        for place in block.operations
        if place >= forward_ends
    )
    head = ends = lives.ends["backward"]
    if begins:
        head = begins[0][0]
        ends = begins[-1][0] + 1
    for (start, name), (stop, _) in itertools.pairwise([*begins, (ends, REST_LAYER)]):
        found[name].peak = max(found[name].peak, int(totals[start:stop].max()))
    for name, block in found.items():
        block.calls = lives.running.calls[name]
    trained = trained_parameters(lives.module)
    return StepEstimate(
        timeline=timeline_of(lives),
        blocks=found,
        fixed=fixed,
        gradients=sum(local.nbytes for one in trained for local in local_tensors(one)),
        head=int(totals[:head].max()),
        tail=int(totals[ends:].max()),
        flops=numpy.array(lives.flops, dtype=numpy.float64),
        moved=numpy.array(lives.moved, dtype=numpy.float64),
        dtype=next(
            (str(one).removeprefix("torch.") for one in lives.dtypes if one), sketch.dtype_name
        ),
        trace=(
            trace_of(lives, sketch.case.workload.output_until) if sketch.kernels == "cuda" else None
        ),
        course=lives.course,
    )


# Times of one rank of several.


def time_of_window(
    step: StepEstimate, profile: DeviceProfile, links: Links, *, steps: int, scale: float = 1.0
) -> RankSeconds:
    """Predict the time of `steps` microbatches of a rank, and of its optimizer step."""
    optimizer = profile.optimizer_seconds(step.fixed, step.gradients)
    if step.course is None:
        seconds = profile.work_seconds(step.flops, step.moved, dtype=step.dtype)
        return RankSeconds(steps * seconds, optimizer=optimizer)
    last, middle = (
        numpy.array(time_of_course(course, profile, links, dtype=step.dtype, scale=scale))
        for course in (step.course, step.middle_course or step.course)
    )
    return RankSeconds(*(last + (steps - 1) * middle).tolist())._replace(optimizer=optimizer)


def count_window(step: StepEstimate, steps: int) -> dict[str, dict[str, int]]:
    """Count the collectives of `steps` microbatches by kind, with their bytes."""
    assert step.course is not None, "only a step of one rank of several has a course"
    counts: dict[str, dict[str, int]] = {}
    for course, times in ((step.course, 1), (step.middle_course or step.course, steps - 1)):
        for one in course.collectives.values():
            count = counts.setdefault(one.kind, {"calls": 0, "bytes": 0})
            count["calls"] += times
            count["bytes"] += times * one.nbytes
    return counts
