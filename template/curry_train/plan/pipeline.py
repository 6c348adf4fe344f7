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
answered from the ranks that ran before. The peaks are those of tensors: what the allocator of CUDA
reserves beside them is not included.

Proof: `python -m pytest tests/plan/test_pipeline.py`.
"""

import contextlib
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.measure import tensors_in
from ..core.rerun import seeded
from ..core.wording import format_bytes, require_whole
from ..workloads.models import import_callable, load_workload
from ..workloads.workload import Workload
from .optimizers import OptimizerFactory, ValuesInSteps, make_optimizer, take_eagerly
from .parallel import Sharding
from .rank_step import RankKernels, local_bytes, one_rank, peak_of_running_rank, replaced
from .shapes import PretendedCase, pretended

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


@dataclass(frozen=True)
class PipelinePeaks:
    """The peaks of one rank at each place in the pipeline, the first place first."""

    workload: str
    batch_size: int
    mesh: Mapping[str, int]
    ranks: tuple[StagePeak, ...]

    @property
    def first(self) -> StagePeak:
        return self.ranks[0]

    @property
    def last(self) -> StagePeak:
        """The rank with the last stage, which is not the last rank in every schedule."""
        return max(self.ranks, key=lambda one: max(one.stages))

    @property
    def heaviest(self) -> StagePeak:
        return max(self.ranks, key=lambda one: one.peak_bytes)

    def table(self, budget_bytes: int | None = None) -> str:
        """Format the peaks at 80 columns, with what a budget leaves for each."""
        heavy = self.heaviest
        text = (
            f"{self.workload}, {self.batch_size} samples a step of the pipeline: the heaviest is "
            f"rank {heavy.rank}, with a peak of {format_bytes(heavy.peak_bytes)}."
        )
        lines = [*textwrap.wrap(text, TABLE_WIDTH), ""]
        margin = "" if budget_bytes is None else f"{'margin':>12}"
        lines.append(f"{'rank':>5}  {'stages':<16} {'parameters':>11} {'peak':>11}{margin}")
        for one in self.ranks:
            if budget_bytes is not None:
                left = budget_bytes - one.peak_bytes
                margin = f"{'-' if left < 0 else ''}{format_bytes(abs(left))}".rjust(12)
            places = [name for name in ("first", "last", "heaviest") if getattr(self, name) is one]
            stages = ", ".join(map(str, one.stages))
            row = (
                f"{one.rank:>5}  {stages:<16} {format_bytes(one.parameter_bytes):>11} "
                f"{format_bytes(one.peak_bytes):>11}{margin}  {', '.join(places)}"
            )
            lines.append(row.rstrip())
        return "\n".join([*lines, "", *textwrap.wrap(TENSORS_NOTE, TABLE_WIDTH)])

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "rank": one.rank,
                "stages": list(one.stages),
                "parameter_bytes": one.parameter_bytes,
                "peak_bytes": one.peak_bytes,
            }
            for one in self.ranks
        ]
        places = {name: getattr(self, name).rank for name in ("first", "last", "heaviest")}
        return {"mesh": dict(self.mesh), "batch_size": self.batch_size, "ranks": rows, **places}


TENSORS_NOTE = (
    "These are the bytes of tensors, optimizer included. On a GPU the allocator reserves more, and "
    "the buffers of NCCL and the context of the process come on top."
)


def pipeline_peaks(
    workload: Workload | str,
    pipeline: PipelineFactory | str,
    *,
    mesh: Mapping[str, int],
    batch_size: int,
    dtype: torch.dtype = torch.float32,
    kernels: str = "cpu",
    optimizer: str | float | OptimizerFactory | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda message: None,
) -> PipelinePeaks:
    """Predict the peak of a rank at each place in a pipeline.

    `mesh` has a dimension `pp`; of the other dimensions the first rank counts. `batch_size` is the
    number of samples of a step, which the schedule divides into its microbatches.
    """
    require_whole("batch_size", batch_size, least=1)
    if PIPELINE_DIMENSION not in mesh:
        raise ValueError(f"a pipeline has a dimension {PIPELINE_DIMENSION} in its mesh, as pp=4")
    function = import_callable(pipeline) if isinstance(pipeline, str) else pipeline
    settings = {"dtype": dtype, "seed": seed}
    program = _Program(workload, function, mesh, batch_size, kernels, optimizer, settings)
    ranks = first_ranks(mesh)
    found: dict[int, StagePeak] = {}
    board = StageBoard()
    # A rank with several stages needs the shapes of stages between them, which run later.
    waiting = ranks
    while waiting:
        for rank in waiting:
            tell(f"rank {rank} of the pipeline")
            board.assumed.pop(rank, None)
            found[rank] = program.peak(rank, board)
        waiting = [rank for rank in ranks if board.is_wrong(rank)]
    return PipelinePeaks(program.name, batch_size, dict(mesh), tuple(found[rank] for rank in ranks))


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
    kernels: str
    optimizer: str | float | OptimizerFactory | None
    settings: Mapping[str, Any]
    name: str = ""

    def peak(self, rank: int, board: "StageBoard") -> StagePeak:
        """Predict the peak of a rank."""
        mode_values = ValuesInSteps()
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(one_rank(self.mesh, rank=rank))
            mode = RankKernels(kernels=self.kernels)
            mode.has_counts = True
            stack.enter_context(pretended(mode=mode, kernels=self.kernels, values=mode_values))
            stages = stack.enter_context(stages_alone(board, rank))
            stack.enter_context(seeded(0))
            stack.enter_context(torch.enable_grad())
            workload = self.workload
            if isinstance(workload, str):
                workload = load_workload(workload)
            case = PretendedCase(workload, **self.settings)
            self.name = workload.name
            chosen = self.optimizer or workload.optimizer or "adamw"
            batch = case.batch(self.batch_size)
            modules: list[nn.Module] = []

            def make() -> Callable[[], object]:
                module, step = running_pipeline(self.pipeline, case.build(), mesh, batch)
                modules.append(module)
                foreach = self.kernels == "cuda"
                return stepping(module, step, make_optimizer(chosen, module, foreach=foreach))

            def given() -> list[Tensor]:
                return [*modules[0].parameters(), *modules[0].buffers(), *tensors_in(batch)]

            peak = peak_of_running_rank(make, given=given)
            held = sum(local_bytes(one) for one in modules[0].parameters())
        return StagePeak(rank, tuple(sorted(stages)), held, peak)


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
    module: nn.Module, run: Callable[[], object], optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """Return a function that trains the stages of a rank by one step."""

    def step() -> None:
        run()
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

    def __init__(self, work: Any, tensor: Any) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, *args: Any) -> Any:
        return self._work.wait(*args)


@contextlib.contextmanager
def stages_alone(board: StageBoard, rank: int) -> Iterator[set[int]]:
    """Let the stages of a rank run without the others; yields the numbers of those that ran.

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
        works = send(operations, desc)
        return [_HeldWork(work, one.tensor) for work, one in zip(works, operations, strict=True)]

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
