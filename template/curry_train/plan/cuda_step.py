"""Predict what training steps allocate and reserve on CUDA, from a step recorded on shapes.

    memory = cuda_memory(sketch.step(4).trace, workspace_bytes=workspace_of("h100"))
    memory.reserved_bytes, memory.expandable_reserved_bytes

A recorded step is repeated in the model of the allocator as a training repeats it. The first step
makes the optimizer state and the workspaces of the matrix products; later steps begin by freeing
the gradients, and the caller's logits and loss live until the next ones are there.

Proof: `python -m pytest tests/plan/test_cuda_step.py`.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.measure import Life
from .cuda_allocator import CudaAllocator, MemoryBlock
from .optimizers import is_fused
from .profiler import OPTIMIZER_STATE_GROUP
from .record import StepLives

# Bytes that cuBLAS allocates for each thread that multiplies; forward and autograd are two.
WORKSPACE_BYTES = 8_519_680
HOPPER_WORKSPACE_BYTES = 33_554_432
HOPPER_CARDS = ("h100", "h200")
# Memory of a process that no tensor can have: CUDA's context and the kernels that torch loads. In
# public reports of full devices it is 0.40 to 0.51 GiB on an RTX 4090, an A100 and an A800.
CONTEXT_BYTES = 512 * 2**20
# More of it where a step has convolutions: the kernels of cuDNN. This is about the difference of
# the constants that were fitted for models of timm and for MLPs on one A100.
CUDNN_BYTES = 304 * 2**20
# After this many steps the reserved memory of nearly every training stays as it is.
NUM_STEPS = 4
# Numbers of an optimizer, such as its step counts, live in host memory unless it is fused.
LARGEST_NUMBER_BYTES = 8


def workspace_of(card: str) -> int:
    """Return the bytes of one cuBLAS workspace on a card."""
    if any(name in card.lower() for name in HOPPER_CARDS):
        return HOPPER_WORKSPACE_BYTES
    return WORKSPACE_BYTES


Event = tuple[Life, bool]


@dataclass(frozen=True)
class StepTrace:
    """Allocations and releases of one step, in order."""

    given: Sequence[Life]  # storages that exist before the first step, in the order they are made
    state: Sequence[Life]  # optimizer state at the start of a later step
    events: Sequence[Event]  # each storage where it is made (True) and where it is freed
    step_start: int  # index of the optimizer step's first event
    gradients: Sequence[Life]  # freed when the next step begins
    products: Sequence[int]  # indices of the results of the first product of each thread
    first_events: Sequence[Event] = ()  # of the optimizer's first step, with storages of its own
    on_host: Collection[Life] = ()  # storages that take no memory of the device
    streams: Mapping[Life, int] = field(default_factory=dict)  # of storages of other streams
    convolutions: Sequence[Life] = ()  # workspaces of cuDNN, which are among the events
    searches: bool = False  # whether the first step tries cuDNN's algorithms


def trace_of(record: StepLives, output_until: str = "next step") -> StepTrace:
    """Build the trace of a recorded step.

    Unless the optimizer is fused, its numbers are in host memory.
    """
    fused = is_fused(record.optimizer)
    first = [one for one in record.first_step if fused or one[0].nbytes > LARGEST_NUMBER_BYTES]
    start = len(record.given)
    # An output that the caller holds is freed at the end of the step, or once the next one exists.
    end = record.event_ends["step"] if output_until == "next step" else None

    def is_state(life: Life) -> bool:
        return life.owner[0] == OPTIMIZER_STATE_GROUP

    def is_on_host(life: Life) -> bool:
        is_of_step = is_state(life) or life.born >= record.ends["backward"]
        return is_of_step and not fused and life.nbytes <= LARGEST_NUMBER_BYTES

    in_order = [
        life for tensor in in_order_of_moving(record.module) for life in record.lives_of(tensor)
    ]
    others = [life for life in record.given if not is_state(life)]
    state = filter(is_state, record.given)
    return StepTrace(
        given=[*dict.fromkeys([*in_order, *others])],
        state=[life for life in state if not is_on_host(life)],
        events=record.events[start:end],
        step_start=record.event_ends["backward"] - start,
        gradients=[life for life in record.gradients if life not in record.given],
        products=[place - start for place in record.products.values()],
        first_events=first,
        on_host={life for life in record.lives if is_on_host(life)},
        streams=record.streams,
        convolutions=record.convolutions,
        searches=torch.backends.cudnn.benchmark,
    )


def in_order_of_moving(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers in the order in which `Module.to` makes them."""
    for child in module.children():
        yield from in_order_of_moving(child)
    tensors: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    yield from (tensor for tensor in tensors if tensor is not None)


@dataclass
class TrainingReplay:
    """Steps of a training in an allocator."""

    trace: StepTrace
    allocator: CudaAllocator
    workspace_bytes: int = WORKSPACE_BYTES

    def __post_init__(self) -> None:
        trace = self.trace
        self._is_first = True
        self._blocks: dict[Life, MemoryBlock] = {}
        self._chosen: set[Hashable] = set()  # convolutions whose algorithm is chosen
        for life in trace.given:
            self._make(life)

    def step(self) -> None:
        """Run one step."""
        trace = self.trace
        for life in trace.gradients:
            self._release(life)
        products = {*trace.products} if self._is_first else set[int]()
        for index, event in enumerate(trace.events[: trace.step_start]):
            self._run(*event)
            if index in products:
                # The result is there before cuBLAS asks for its workspace.
                self.allocator.allocate(self.workspace_bytes)
        is_first = self._is_first and bool(trace.state)
        events = trace.first_events if is_first else trace.events[trace.step_start :]
        for event in events:
            self._run(*event)
        self._name_state(events, is_first)
        self._is_first = False

    def _run(self, life: Life, is_made: bool) -> None:
        if not is_made:
            self._release(life)
            return
        is_searched = self.trace.searches and life in self.trace.convolutions
        if is_searched and life.owner not in self._chosen:
            self._chosen.add(life.owner)
            self.allocator.empty_cache()
        # Tensors of the previous step are freed once their successors exist.
        before = self._blocks.pop(life, None)
        self._make(life)
        if before is not None:
            self.allocator.free(before)

    def _name_state(self, events: Sequence[Event], is_first: bool) -> None:
        """Let what the optimizer made be the state of the next step; make the rest of the first."""
        trace = self.trace
        new = self._blocks.keys() - {*trace.given, *trace.state}
        made = [life for life, _ in events if life in new]
        for life in trace.state:
            if life in self._blocks:
                continue
            same = [one for one in made if one.nbytes == life.nbytes]
            if same:
                made.remove(same[0])
                self._blocks[life] = self._blocks.pop(same[0])
            elif is_first:
                self._make(life)

    def _make(self, life: Life) -> None:
        if life.nbytes and life not in self.trace.on_host:
            stream = self.trace.streams.get(life, 0)
            self._blocks[life] = self.allocator.allocate(life.nbytes, stream=stream)

    def _release(self, life: Life) -> None:
        block = self._blocks.pop(life, None)
        if block is not None:
            self.allocator.free(block)


@dataclass(frozen=True)
class CudaMemory:
    """Memory of a training on CUDA, as the allocator counts it."""

    allocated_bytes: int  # torch.cuda.max_memory_allocated
    reserved_bytes: int  # torch.cuda.max_memory_reserved after several steps
    first_step_reserved_bytes: int


def cuda_memory(
    trace: StepTrace,
    *,
    workspace_bytes: int = WORKSPACE_BYTES,
    expandable: bool = False,
    num_steps: int = NUM_STEPS,
) -> CudaMemory:
    """Run steps of a trace in the allocator."""
    allocator = CudaAllocator(expandable_segments=expandable)
    replay = TrainingReplay(trace, allocator, workspace_bytes=workspace_bytes)
    replay.step()
    first = allocator.peak_reserved
    for _ in range(1, num_steps):
        replay.step()
    return CudaMemory(allocator.peak_allocated, allocator.peak_reserved, first)
