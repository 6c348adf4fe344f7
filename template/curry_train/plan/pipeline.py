"""Predict the peak of every rank of a pipeline, from its own stages and schedule.

    found = pipeline_peaks("transformer", "train.py:pipeline", mesh={"pp": 4}, batch_size=32)
    print(found.table())

A pipeline is a function of the user's own that builds the stages of its rank with
`torch.distributed.pipelining`, and returns them with a step:

    def pipeline(model, mesh):
        part = my_part_of(model, mesh.get_rank())
        stage = PipelineStage(part, mesh.get_rank(), mesh.size(), torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=my_loss)

        def step(batch): ...    # calls schedule.step with what this rank has of a batch
        return part, step

Each rank runs in this process, on shapes, as in `rank_step.py`. What stages ask of each other is
answered from the ranks that ran before. On a GPU the storages of its steps pass through the model
of CUDA's allocator, and the time of a step follows from the messages between the ranks.

Proof: `python -m pytest tests/plan/test_pipeline.py`.
"""

import contextlib
import functools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.measure import REST_LAYER, Life, tensors_in
from ..core.rerun import seeded, unwatched
from ..core.wording import format_bytes, format_seconds, require_whole
from ..workloads.models import import_callable, load_workload
from ..workloads.workload import Workload
from .cuda_allocator import CudaAllocator, MemoryBlock
from .cuda_step import (
    CONTEXT_BYTES,
    LARGEST_NUMBER_BYTES,
    NUM_STEPS,
    in_order_of_moving,
    workspace_of,
)
from .device import DeviceProfile, find_profile
from .optimizers import OptimizerFactory, ValuesInSteps, is_fused, make_optimizer, take_eagerly
from .parallel import Sharding, is_offloaded
from .profiler import ACTIVATIONS_GROUP, OPTIMIZER_STATE_GROUP
from .rank_step import (
    RankKernels,
    RankStorages,
    local_bytes,
    one_rank,
    peak_of_running_rank,
    replaced,
)
from .rank_time import (
    RECEIVE_KIND,
    SEND_KIND,
    CourseRecorder,
    Links,
    Message,
    PipelineSeconds,
    StageCourse,
    links_of,
    time_of_pipeline,
)
from .shapes import PretendedCase, pretended
from .timeline import MATRIX_PRODUCTS, operation_cost

PIPELINE_DIMENSION = "pp"
TABLE_WIDTH = 80

# The modules of a rank, which the optimizer trains, and its forward and backward of a batch.
StagesAndStep = tuple[nn.Module, Callable[[Any], object]]
PipelineFactory = Callable[[nn.Module, Any], StagesAndStep]


@dataclass(frozen=True)
class StagePeak:
    """The peak of one rank of a pipeline."""

    rank: int
    stages: tuple[int, ...]
    parameter_bytes: int
    peak_bytes: int

    # What CUDA's allocator reserves in several steps; None on the CPU.
    reserved_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """The bytes of the tensors, or what is reserved for them."""
        return max(self.peak_bytes, self.reserved_bytes or 0)


@dataclass(frozen=True)
class PipelinePeaks:
    """The peaks of one rank at each place in the pipeline, the first place first."""

    workload: str
    batch_size: int
    mesh: Mapping[str, int]
    ranks: tuple[StagePeak, ...]

    # Memory of a GPU that each process takes beside tensors.
    context_bytes: int = 0

    # Predicted from the rates of a device and its links; None without a device.
    seconds: PipelineSeconds | None = None
    links: Links | None = None

    # What CUDA gives to processes of the device; None if unknown.
    usable_bytes: int | None = None

    @property
    def first(self) -> StagePeak:
        return self.ranks[0]

    @property
    def last(self) -> StagePeak:
        """The rank with the last stage, which is not the last rank in every schedule."""
        return max(self.ranks, key=lambda one: max(one.stages, default=-1))

    @property
    def heaviest(self) -> StagePeak:
        return max(self.ranks, key=lambda one: one.needed_bytes)

    @property
    def most_bytes(self) -> int:
        """The memory that the heaviest rank takes, with the context of its process."""
        return self.heaviest.needed_bytes + self.context_bytes

    def limit(self, budget_bytes: int) -> int:
        """Return a budget, or what the device has if that is less."""
        return min(budget_bytes, self.usable_bytes or budget_bytes)

    def table(self, budget_bytes: int | None = None) -> str:
        """Format the peaks at 80 columns, with what a budget leaves for each."""
        heavy = self.heaviest
        text = (
            f"{self.workload}, {self.batch_size} samples a step of the pipeline: the heaviest is "
            f"rank {heavy.rank}, with a peak of {format_bytes(heavy.peak_bytes)}"
        )
        if heavy.reserved_bytes is not None:
            text += f", for which the allocator reserves {format_bytes(heavy.reserved_bytes)}"
        lines = [*textwrap.wrap(text + ".", TABLE_WIDTH), ""]
        columns = ["parameters", "peak", *["reserved"] * self._is_reserved]
        columns += ["margin"] * (budget_bytes is not None)
        titles = "".join(f"{name:>11}" for name in columns)
        lines.append(f"{'rank':>5}  {'stages':<10}{titles}")
        for one in self.ranks:
            sizes = [one.parameter_bytes, one.peak_bytes]
            sizes += [one.reserved_bytes or 0] * self._is_reserved
            if budget_bytes is not None:
                sizes.append(self.limit(budget_bytes) - one.needed_bytes - self.context_bytes)
            stages = ", ".join(map(str, one.stages))
            cells = "".join(f"{_signed(size):>11}" for size in sizes)
            places = [name for name in ("first", "last", "heaviest") if getattr(self, name) is one]
            lines += _row(f"{one.rank:>5}  {stages:<10}{cells}  ", ", ".join(places))
        notes = [self._bytes_note, *([] if self.seconds is None else [self._time_note])]
        return "\n".join([*lines, "", *(line for n in notes for line in _wrapped(n))])

    @property
    def _is_reserved(self) -> bool:
        return self.heaviest.reserved_bytes is not None

    @property
    def _bytes_note(self) -> str:
        if not self._is_reserved:
            return TENSORS_NOTE
        return (
            f"The margin leaves {format_bytes(self.context_bytes)} for the context of the process "
            f"too. {OUTSIDE_NOTE}"
        )

    @property
    def _time_note(self) -> str:
        assert self.seconds is not None
        found = self.seconds
        busiest = max(found.compute, key=lambda rank: found.compute[rank])
        return (
            f"A step takes {format_seconds(found.total)}, estimated and not measured: rank "
            f"{busiest} computes for {format_seconds(found.compute[busiest])}, and ranks wait in "
            f"{found.bubble:.0%} of the schedule on average (the bubble). Links: {self.links}."
        )

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "rank": one.rank,
                "stages": list(one.stages),
                "parameter_bytes": one.parameter_bytes,
                "peak_bytes": one.peak_bytes,
                "reserved_bytes": one.reserved_bytes,
            }
            | ({} if self.seconds is None else {"compute_seconds": self.seconds.compute[one.rank]})
            for one in self.ranks
        ]
        places = {name: getattr(self, name).rank for name in ("first", "last", "heaviest")}
        found = {"mesh": dict(self.mesh), "batch_size": self.batch_size, "ranks": rows, **places}
        if self.seconds is not None and self.links is not None:
            found |= self.seconds.to_json() | {"links": self.links.to_json()}
        return found | {"context_bytes": self.context_bytes}


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else ''}{format_bytes(abs(size))}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, TABLE_WIDTH)


def _row(start: str, end: str) -> list[str]:
    """Return a row of the table, whose end may need further lines."""
    first, *more = textwrap.wrap(end, TABLE_WIDTH - len(start)) or [""]
    return [(start + first).rstrip(), *(" " * len(start) + text for text in more)]


TENSORS_NOTE = (
    "These are the bytes of tensors, optimizer included. On a GPU the allocator reserves more, and "
    "the buffers of NCCL and the context of the process come on top."
)
OFFLOADED_STAGES = (
    "FSDP2's CPUOffloadPolicy is not planned for in the stages of a pipeline: leave offload_policy "
    "out of fully_shard"
)
OUTSIDE_NOTE = "The buffers of NCCL are not in these figures."


def pipeline_peaks(
    workload: Workload | str,
    pipeline: PipelineFactory | str,
    *,
    mesh: Mapping[str, int],
    batch_size: int,
    dtype: torch.dtype = torch.float32,
    device: str | DeviceProfile | None = None,
    links: Links | None = None,
    context_bytes: int | None = None,
    optimizer: str | float | OptimizerFactory | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda message: None,
) -> PipelinePeaks:
    """Predict the peak of a rank at each place in a pipeline, and the time of a step.

    `mesh` has a dimension `pp`; of the other dimensions the first rank counts. `batch_size` is the
    number of samples of a step, which the schedule divides into its microbatches. Without `device`
    it is this CPU, and no time is predicted.
    """
    require_whole("batch_size", batch_size, least=1)
    if PIPELINE_DIMENSION not in mesh:
        raise ValueError(f"a pipeline has a dimension {PIPELINE_DIMENSION} in its mesh, as pp=4")
    function = import_callable(pipeline) if isinstance(pipeline, str) else pipeline
    profile = find_profile(device) if isinstance(device, str) else device
    settings = {"dtype": dtype, "seed": seed}
    program = _Program(workload, function, mesh, batch_size, profile, optimizer, settings)
    ranks = first_ranks(mesh)
    by_rank: dict[int, StagePeak] = {}
    board = StageBoard()
    # A rank with several stages needs the shapes of stages between them, which run later.
    waiting = ranks
    while waiting:
        for rank in waiting:
            tell(f"rank {rank} of the pipeline")
            board.assumed.pop(rank, None)
            by_rank[rank] = program.peak(rank, board)
        waiting = [rank for rank in ranks if board.is_wrong(rank)]

    peaks = tuple(by_rank[rank] for rank in ranks)
    found = PipelinePeaks(program.name, batch_size, dict(mesh), peaks)
    if profile is None:
        return found
    links = links or links_of(profile.name)
    name = str(dtype).removeprefix("torch.")
    seconds = time_of_pipeline(program.courses, profile, links, dtype=name)
    context = 0
    if program.kernels == "cuda":
        context = CONTEXT_BYTES if context_bytes is None else context_bytes
    return replace(
        found,
        context_bytes=context,
        seconds=seconds,
        links=links,
        usable_bytes=profile.usable_bytes,
    )


def first_ranks(mesh: Mapping[str, int]) -> list[int]:
    """Return a rank at each place in the pipeline: the first one of the other dimensions."""
    sizes = [*mesh.values()]
    place = [*mesh].index(PIPELINE_DIMENSION)
    stride = math.prod(sizes[place + 1 :])
    return [index * stride for index in range(mesh[PIPELINE_DIMENSION])]


def is_pipeline(mesh: Mapping[str, int]) -> bool:
    """Check whether ranks along a mesh have stages of their own."""
    return mesh.get(PIPELINE_DIMENSION, 1) > 1


def samples_of_pipeline(mesh: Mapping[str, int], global_batch: int) -> int:
    """Return the samples of one pipeline, of those that share the global batch."""
    ((size, steps),) = Sharding(mesh=mesh).microbatches(global_batch)[-1:]
    return size * steps


@dataclass
class _Program:
    """The program of every rank, to run without values."""

    workload: Workload | str
    pipeline: PipelineFactory
    mesh: Mapping[str, int]
    batch_size: int
    profile: DeviceProfile | None
    optimizer: str | float | OptimizerFactory | None
    settings: Mapping[str, Any]
    name: str = ""

    # What each rank computes and sends in a step.
    courses: dict[int, StageCourse] = field(default_factory=dict)

    @property
    def kernels(self) -> str:
        if self.profile is None or self.profile.host_bytes_per_second is None:
            return "cpu"
        return "cuda"

    def peak(self, rank: int, board: "StageBoard") -> StagePeak:
        """Predict the peak of a rank."""
        on_cuda = self.kernels == "cuda"
        storages = StageStorages()
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(one_rank(self.mesh, rank=rank))
            mode = RankKernels(kernels=self.kernels)
            mode.has_counts = True
            stack.enter_context(pretended(mode=mode, kernels=self.kernels, values=ValuesInSteps()))
            stages = stack.enter_context(stages_alone(board, rank, storages))
            stack.enter_context(seeded(0))
            stack.enter_context(torch.enable_grad())
            workload = self.workload
            if isinstance(workload, str):
                workload = load_workload(workload)
            case = PretendedCase(workload, **self.settings)
            self.name = workload.name
            chosen = self.optimizer or workload.optimizer or "adamw"
            batch = case.batch(self.batch_size)
            built: list[Any] = []

            def make() -> Callable[[], object]:
                module, step = running_pipeline(self.pipeline, case.build(), mesh, batch)
                if on_cuda and is_offloaded(module):
                    raise ValueError(OFFLOADED_STAGES)
                optimizer = make_optimizer(chosen, module, foreach=on_cuda)
                built.extend((module, optimizer))
                return stepping(module, step, optimizer, storages)

            def given() -> list[Tensor]:
                return [*built[0].parameters(), *built[0].buffers(), *tensors_in(batch)]

            num_steps = NUM_STEPS if on_cuda else FEWEST_STEPS
            peak = peak_of_running_rank(
                make, given=given, num_steps=num_steps - 1, storages=storages
            )
            module, optimizer = built
            reserved = None
            if on_cuda and self.profile is not None:
                workspace = workspace_of(self.profile.name)
                fused = is_fused(optimizer)
                reserved = storages.reserved(module, workspace_bytes=workspace, fused=fused)
            held = sum(local_bytes(one) for one in module.parameters())
            fixed = [*given(), *tensors_in([*optimizer.state.values()])]
            trained = sum(local_bytes(one) for one in module.parameters() if one.requires_grad)
            self.courses[rank] = storages.course(sum(map(local_bytes, fixed)), trained)
        return StagePeak(rank, tuple(sorted(stages)), held, peak, reserved)


# The optimizer makes its state in the first step, and DDP divides its buckets after it.
FEWEST_STEPS = 3


class StageStorages(RankStorages):
    """Follow the storages of a rank in all its steps, and the messages and costs of the last."""

    def __init__(self) -> None:
        super().__init__(owner=self._owner_now)
        self.messages: list[Message] = []
        # Events before the first step, and those before the first product of each thread.
        self._first_event: int | None = None
        self._products: dict[str, int] = {}
        self._in_optimizer = False
        # None outside of forward and backward.
        self._recorder: CourseRecorder | None = None
        self._recorded = CourseRecorder()
        self._flops: list[int] = []
        self._moved: list[int] = []

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in MATRIX_PRODUCTS and self._first_event is not None:
            self.settle()
            # Autograd multiplies on a thread of its own.
            thread = "forward" if torch.is_grad_enabled() else "backward"
            self._products.setdefault(thread, len(self.events))
        before = self.num_operations
        with unwatched():
            out = super().run(func, args, kwargs)
            if self._recorder is not None and self.num_operations > before:
                flops, moved = operation_cost(func, args, kwargs, out)
                self._flops.append(flops)
                self._moved.append(moved)
                stream = self.stream_number
                self._recorder.add(func, args, kwargs, out, stream=stream)
        return out

    def begin_step(self) -> None:
        """Record forward and backward of a step, in place of the step before."""
        self.settle()
        if self._first_event is None:
            self._first_event = len(self.events)
        self._recorder = self._recorded = CourseRecorder()
        self._flops = []
        self._moved = []
        self.messages = []

    @contextlib.contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Count what is made in here as the optimizer's."""
        self._recorder = None
        self._in_optimizer = True
        try:
            yield
        finally:
            self._in_optimizer = False

    def _owner_now(self) -> tuple[str, str]:
        group = OPTIMIZER_STATE_GROUP if self._in_optimizer else ACTIVATIONS_GROUP
        return group, REST_LAYER

    @contextlib.contextmanager
    def messaging(self, operations: Sequence[Any]) -> Iterator[list[int]]:
        """Record messages, and no operation of theirs; yields their numbers."""
        recorder = self._recorder
        self._recorder = None
        numbers = [*range(len(self.messages), len(self.messages) + len(operations))]
        for number, one in zip(numbers, operations, strict=True):
            kind = SEND_KIND if one.op is torch.distributed.isend else RECEIVE_KIND
            size = local_bytes(one.tensor)
            self.messages.append(Message(len(self._flops), kind, number, one.peer, size))
        try:
            yield numbers
        finally:
            self._recorder = recorder

    def wait_for(self, number: int) -> None:
        """Record the wait for a message."""
        self.messages.append(Message(len(self._flops), None, number))

    def course(self, fixed: int, gradients: int) -> StageCourse:
        """Return what the last step computed and sent."""
        course = self._recorded.finish(self._flops, self._moved)
        return StageCourse(course, self.messages, fixed, gradients)

    def reserved(self, module: nn.Module, *, workspace_bytes: int, fused: bool) -> int:
        """Return what CUDA's allocator reserves in the steps.

        Unless the optimizer is `fused`, its numbers are in host memory.
        """
        assert self._first_event is not None, "no step has run"

        def counts(life: Life) -> bool:
            is_number = life.owner[0] == OPTIMIZER_STATE_GROUP
            return fused or not is_number or life.nbytes > LARGEST_NUMBER_BYTES

        allocator = CudaAllocator()
        blocks: dict[int, MemoryBlock] = {}

        def run(life: Life, *, made: bool) -> None:
            if made:
                stream = self.streams.get(id(life), 0)
                blocks[id(life)] = allocator.allocate(life.nbytes, stream=stream)
            else:
                allocator.free(blocks.pop(id(life)))

        alive: dict[int, Life] = {}
        for life, made in self.events[: self._first_event]:
            if made:
                alive[id(life)] = life
            else:
                alive.pop(id(life))
        in_order = [one for t in in_order_of_moving(module) for one in self.lives_of(t)]
        before = {id(life): life for life in in_order if id(life) in alive}
        for life in (before | alive).values():
            run(life, made=True)
        products = [*self._products.values()]
        for index in range(self._first_event, len(self.events)):
            for _ in range(products.count(index)):
                allocator.allocate(workspace_bytes)
            life, made = self.events[index]
            if counts(life):
                run(life, made=made)
        return allocator.peak_reserved


def running_pipeline(
    pipeline: PipelineFactory, model: nn.Module, mesh: Any, batch: Any
) -> tuple[nn.Module, Callable[[], object]]:
    """Build the stages of this rank, and return them with forward and backward of the batch."""
    made = pipeline(model, mesh)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(
            f"the pipeline returned {type(made).__name__}: return the modules of this rank as one "
            "module, and a function that runs the schedule on a batch"
        )
    module, step = made
    return module, lambda: step(batch)


def stepping(
    module: nn.Module,
    run: Callable[[], object],
    optimizer: torch.optim.Optimizer,
    storages: StageStorages | None = None,
) -> Callable[[], None]:
    """Return a function that trains the stages of a rank by one step, which may be recorded."""

    def step() -> None:
        if storages is not None:
            storages.begin_step()
        run()
        with contextlib.nullcontext() if storages is None else storages.optimizer_step():
            take_eagerly(optimizer)
        optimizer.zero_grad(set_to_none=True)

    return step


# Messages between stages: the shapes that they exchange before the first step, and their sends.


@dataclass
class StageBoard:
    """The shapes that each stage hands to the next one, as far as they ran."""

    outputs: dict[int, Any] = field(default_factory=dict)

    # Of each rank, the outputs of stages that had not run, by stage.
    assumed: dict[int, dict[int, Any]] = field(default_factory=dict)

    def output_of(self, stage: int, *, rank: int) -> Any:
        """Return the shapes that a stage hands on: those of an earlier stage until it has run."""
        if stage not in self.outputs:
            earlier = [one for one in self.outputs if one < stage]
            found = self.outputs[max(earlier)]
            self.assumed.setdefault(rank, {})[stage] = found
            return found
        return self.outputs[stage]

    def is_wrong(self, rank: int) -> bool:
        """Check whether a stage has handed on other shapes than were assumed."""
        assumed = self.assumed.get(rank, {})
        return any(self.outputs.get(stage) != shapes for stage, shapes in assumed.items())


class _NotKnown:
    """The result of the vote of all stages on whether their shapes are given: they are not.

    Where they are given, torch compares them with those of the first microbatch.
    """

    def item(self) -> int:
        return 0


class _HeldWork:
    """A send or receive that holds its tensor until the work is dropped, as gloo and NCCL do."""

    def __init__(self, work: Any, tensor: Any, wait: Callable[[], None]) -> None:
        self._work = work
        self._tensor = tensor
        self._wait = wait

    def wait(self, *args: Any) -> Any:
        self._wait()
        return self._work.wait(*args)


@contextlib.contextmanager
def stages_alone(board: StageBoard, rank: int, storages: StageStorages) -> Iterator[set[int]]:
    """Let the stages of a rank run without the others; yields the numbers of those that ran.

    `storages` records their messages.

    Corrections are those of torch 2.13. The gradients that a stage receives have the shapes of its
    outputs.
    """
    # Imported here because a plan without pipelines needs none of it.
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.distributed.pipelining import stage as stage_module

    seen: set[int] = set()
    private = vars(stage_module)
    send = schedules._batch_p2p

    def vote(stage: Any, *_: Any, **__: Any) -> _NotKnown:
        seen.add(stage.stage_index)
        return _NotKnown()

    def receive(stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return board.output_of(source, rank=rank)
        metas = private["_derive_grad_metas"](stage._stage_meta.outputs)
        return private["_StageBackwardMeta"](backward_metas=metas)

    def hand_on(stage: Any, meta: Any, target: int) -> None:
        if target > stage.stage_index:
            board.outputs[stage.stage_index] = meta

    def held(operations: Any, desc: Any = None) -> list[_HeldWork]:
        with storages.messaging(operations) as numbers:
            works = send(operations, desc)
        return [
            _HeldWork(work, one.tensor, functools.partial(storages.wait_for, number))
            for work, one, number in zip(works, operations, numbers, strict=True)
        ]

    with contextlib.ExitStack() as stack:
        for name, value in (
            ("_warmup_forward_vote", vote),
            ("_warmup_backward_result", vote),
            ("_recv_meta", receive),
            ("_send_meta", hand_on),
        ):
            stack.enter_context(replaced(PipelineStage, name, value))
        stack.enter_context(replaced(schedules, "_batch_p2p", held))
        yield seen
