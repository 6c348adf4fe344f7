"""Record one training step: its storages with their owners, its events and costs, and its course.

A step is real or on shapes, of a model alone or of one rank among others. Timeline, estimate, the
model of CUDA's allocator and the time of a rank are all read off this record.

Proof: `python -m pytest tests/plan/test_timeline.py tests/plan/test_ranks.py`.
"""

import bisect
import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from ..core.generators import unwatched
from ..core.measure import (
    REST_LAYER,
    UNKNOWN,
    Life,
    LiveStorages,
    RunningLayers,
    backward_node,
    dense_parts,
    local_tensors,
    next_node,
    operands,
    operation_flops,
    requested_bytes,
    tensors_in,
)
from ..primitives import sac
from ..workloads.optimizers import copy_optimizer, parameters_of
from .optimizers import ValuesInSteps, take_eagerly
from .profiler import (
    ACTIVATIONS_GROUP,
    BATCH_GROUP,
    COLLECTIVES_GROUP,
    GATHERED_GROUP,
    GRADIENTS_GROUP,
    OPTIMIZER_STATE_GROUP,
    PARAMETERS_GROUP,
    STEP_PHASES,
    TEMPORARIES_GROUP,
)
from .rank_time import C10D_NAMESPACE, StepCourse
from .shapes import fake_mode
from .workspaces import convolutions_of

# Storages of a program, which may be one rank among others.

MATRIX_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}
SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default
# Classes of objects in which bitsandbytes keeps what its parameters are scaled with.
STATES_OF_PARAMETERS = ("QuantState", "MatmulLtState")
OWNERS_OF_PASSING = (ACTIVATIONS_GROUP, TEMPORARIES_GROUP)


class RankStorages(LiveStorages):
    """Follow the storages below DTensors, and those whose size changes, as FSDP2's do.

    It is entered before a model is wrapped, because DDP makes its buckets then. `streams` has the
    number of the stream of each storage that is not of the default stream.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.streams: dict[Life, int] = {}
        self._stream_numbers: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> "RankStorages":
        super().__enter__()
        if not dist.is_initialized():
            return self
        # Imported here because a plan of one rank needs no sharding.
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        resize = torch.UntypedStorage.resize_
        name = "_propagate_tensor_meta_non_cached"
        propagate = getattr(ShardingPropagator, name)

        def resized(storage: Any, size: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, size)
            self._note_resize(storage, before)
            return result

        def paused(propagator: Any, schema: Any) -> Any:
            # DTensor runs each operation once on fake tensors of the global shape.
            with mock.patch.object(self, "run", lambda func, args, kwargs: func(*args, **kwargs)):
                return propagate(propagator, schema)

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        self._patches.enter_context(mock.patch.object(ShardingPropagator, name, paused))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._patches.close()
        super().__exit__(*raised)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            # `torch.tensor` has made its storage without an operation.
            self._meet(args[0], was_there=False)
        if func.namespace == C10D_NAMESPACE:
            lives = (life for tensor in operands(args, kwargs) for life in self.lives_of(tensor))
            for life in lives:
                if isinstance(life.owner, tuple) and life.owner[0] in OWNERS_OF_PASSING:
                    life.owner = COLLECTIVES_GROUP, REST_LAYER
        return super().run(func, args, kwargs)

    def follow_rest(self, before: "RankStorages") -> None:
        """Follow what another record has seen and still lives, such as the buckets of DDP."""
        for key, (reference, life) in [*before._known.items()]:
            storage = reference()
            if storage is None or life is None or life.died is not None or key in self._known:
                continue
            self._watch(storage, Life(life.nbytes, life.owner, self.num_operations))

    def _watch(self, storage: Any, life: Life | None) -> None:
        super()._watch(storage, life)
        number = self.stream_number
        if number and life is not None:
            self.streams[life] = number

    @property
    def stream_number(self) -> int:
        """The number of the current stream; the default one has 0."""
        return self._stream_numbers.setdefault(
            torch.cpu.current_stream(), len(self._stream_numbers)
        )

    def _note_resize(self, storage: Any, before: int) -> None:
        """Count a storage without bytes as freed, and one that has them again as a new one.

        FSDP2 does this to the parameters that it gathers.
        """
        size = storage.nbytes()
        reference, life = self._known.get(storage._cdata, UNKNOWN)
        if reference() is None:
            life = None
        if size == before or (life is None and size < before):
            return
        self.settle()
        if life is not None:
            self.bytes_alive -= life.nbytes
            life.died = self.num_operations
            life.owner = GATHERED_GROUP, REST_LAYER
            self.events.append((life, False))
            self._known[storage._cdata] = weakref.ref(storage), None
        if size:
            owner = GATHERED_GROUP, REST_LAYER
            self._watch(storage, Life(size, owner, self.num_operations))
        self.bytes_peak = max(self.bytes_peak, self.bytes_alive)


class StepLayers(RunningLayers):
    """Follow the layers of a step: what goes into and out of each, and whose backward runs."""

    def __init__(self, record: "StepLives", layers: Mapping[str, nn.Module]) -> None:
        super().__init__(layers)
        # The layer whose input a storage is first; none yet for an output.
        self.holders: dict[Life, str] = {}
        # The numbers of autograd's nodes from which on they are of a layer, or of none.
        self._first_nodes: list[tuple[int, str]] = [(0, REST_LAYER)]
        self._in_backward = REST_LAYER
        # The record holds this object: without a cycle both are freed at once.
        self._record = weakref.proxy(record)

    def entered(self, layer: str, inputs: Any) -> None:
        self._first_nodes.append((next_node(), layer))
        for life in self._find_passed(inputs):
            if self.holders.get(life, REST_LAYER) == REST_LAYER:
                self.holders[life] = layer

    def left(self, layer: str, output: Any) -> None:
        self._first_nodes.append((next_node(), self.current))
        for life in self._find_passed(output):
            self.holders.setdefault(life, REST_LAYER)

    def _find_passed(self, values: Any) -> list[Life]:
        """Return the storages of torch's own tensors that are passed in forward."""
        if self._record.phase != "forward":
            return []
        return [
            life
            for tensor in tensors_in(values)
            if type(tensor).__module__.split(".")[0] == "torch"
            for life in self._record.lives_of(tensor)
        ]

    @property
    def in_backward(self) -> str:
        """The layer whose backward runs: the one in whose forward the node was made."""
        node = backward_node()
        # A node that accumulates a gradient has the largest number, and runs after its layer's.
        if node is not None and node._sequence_nr() < next_node():
            place = bisect.bisect_left(self._first_nodes, (node._sequence_nr() + 1,))
            _, self._in_backward = self._first_nodes[place - 1]
        return self._in_backward


@dataclass
class LayerFigures:
    """The operations of a layer in a step, over all of its calls, and the bytes that it holds."""

    # Indices of its operations in forward and backward, and 1 for those in grad mode.
    operations: list[int] = field(default_factory=list)
    in_grad_mode: list[int] = field(default_factory=list)
    # Family, bytes of the output and FLOPs of each expensive operation of its first call.
    expensive: list[tuple[str, int, int]] = field(default_factory=list)
    # Set for the blocks of an estimated step: activations held after forward, which are what it
    # makes and gets, without what it returns; and most bytes alive in its backward, 0 if unknown.
    calls: int = 0
    held: int = 0
    peak: int = 0


class StepLives(RankStorages):
    """Record the storages of a step, and the costs of each operation of forward and backward.

    The owner of a storage is a pair of group and layer.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        layers: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        state: "OptimizerState | None",
    ) -> None:
        super().__init__(owner=self._find_owner, device=device)
        # What the optimizer's first step makes and frees on the device, if it is known.
        self.first_step = [] if state is None else state.first_step
        # Dtypes in which FSDP2 gathers parameters; None for their own.
        self.dtypes: set[torch.dtype | None] = set()
        # FLOPs of each operation, and the bytes it reads and writes.
        self.flops: list[int] = []
        self.moved: list[int] = []
        # The collectives of one rank among others, and where it waits for them.
        self.course = StepCourse(self.flops, self.moved) if dist.is_initialized() else None
        self.figures: defaultdict[str, LayerFigures] = defaultdict(LayerFigures)
        self.module = module
        self.cuda = device if device.type == "cuda" else None
        # Bytes of the device that are not of this training.
        self.before = 0
        self.running = StepLayers(self, layers)
        self.optimizer = optimizer
        self._later_phases = iter(STEP_PHASES)
        self.phase = next(self._later_phases)
        self.phases: list[str] = []
        self.allocated: list[int] = []
        self.ends: dict[str, int] = {}
        # Numbers of events at the end of each phase, and at the first product of each thread.
        self.event_ends: dict[str, int] = {}
        self.products: dict[bool, int] = {}
        # Workspaces of cuDNN, which live for a call.
        self.convolutions: list[Life] = []
        # Storages that exist before the step, and the gradients after it.
        self.given: list[Life] = []
        self.gradients: list[Life] = []
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.cuda)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in MATRIX_PRODUCTS:
            # Autograd multiplies on a thread of its own.
            self.products.setdefault(self.phase == "backward", len(self.events))
        with unwatched():
            out = super().run(func, args, kwargs)
            for workspace in convolutions_of(func, args, out):
                self.convolutions.append(workspace)
                self.events += [(workspace, True), (workspace, False)]
            self._read()
            if self.phase != "step":
                flops, moved = operation_cost(func, args, kwargs, out)
                self._add_work(func, args, kwargs, out, flops)
                self.flops.append(flops)
                self.moved.append(moved)
                if self.course is not None:
                    self.course.add(func, args, kwargs, out, stream=self.stream_number)
            if func is SOFTMAX_BACKWARD and getattr(fake_mode(), "kernels", None) == "cuda":
                # CUDA's kernel multiplies gradient and output into a tensor of its own.
                self.run(torch.ops.aten.mul.Tensor, args[:2], {})
        return out

    def _add_work(self, func: Any, args: Any, kwargs: Any, out: Any, flops: int) -> None:
        """Add an operation to the layer that runs, or whose backward runs."""
        running, is_forward = self.running, self.phase == "forward"
        in_grad_mode = is_forward or torch.is_grad_enabled()
        layer = running.current if in_grad_mode else REST_LAYER
        if layer == REST_LAYER and not is_forward:
            layer = running.in_backward
        figures = self.figures[layer]
        figures.operations.append(len(self.flops))
        figures.in_grad_mode.append(in_grad_mode)
        family = sac.FAMILIES.get(func) if is_forward and running.calls[layer] == 1 else None
        if family:
            made = sum(value.untyped_storage().nbytes() for value in operands(out))
            # A call that draws random numbers must not be kept: keeping 0 FLOPs gains nothing.
            drawn = sac.draws(func, args, kwargs)
            figures.expensive.append((family, 0, 0) if drawn else (family, made, flops))

    def follow_all(self, batch: Any, earlier: Iterable[RankStorages] = ()) -> None:
        """Count the tensors that exist before the step, and what earlier records have seen."""
        parameters = list(self.module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for owner, tensors in (
            (PARAMETERS_GROUP, [*parameters, *_attributes_of(parameters)]),
            (OPTIMIZER_STATE_GROUP, tensors_in(self.optimizer.state)),
            (GRADIENTS_GROUP, gradients),
            (BATCH_GROUP, [*self.module.buffers(), *tensors_in(batch)]),
        ):
            for tensor in tensors:
                self.follow(tensor, owner=(owner, REST_LAYER))
        for record in earlier:
            self.follow_rest(record)
        self.given = list(self.lives)

    def own(self, group: str, tensors: Iterable[Tensor]) -> list[Life]:
        """Assign the tensors that the step made to a group, and return their storages."""
        lives = [life for tensor in tensors for life in self.lives_of(tensor)]
        for life in lives:
            if life.owner[0] != PARAMETERS_GROUP:
                life.owner = (group, REST_LAYER)
        return lives

    def end_phase(self) -> None:
        """Add a point for the bytes that remain when the local variables of a phase are gone."""
        self.settle()
        self.ends[self.phase] = self.num_operations
        self.event_ends[self.phase] = len(self.events)
        self.num_operations += 1
        self._read()
        self.phase = next(self._later_phases, self.phase)

    def _read(self) -> None:
        self.phases.append(self.phase)
        if self.cuda:
            self.allocated.append(requested_bytes(self.cuda) - self.before)

    @functools.cached_property
    def curves(self) -> Mapping[str, NDArray[numpy.int64]]:
        """The bytes of each group that are alive after each operation of the finished record."""
        length = len(self.phases)
        curves: defaultdict[str, NDArray[numpy.int64]]
        curves = defaultdict(lambda: numpy.zeros(length, dtype=numpy.int64))
        for life in self.lives:
            curves[life.owner[0]][life.born : life.died] += life.nbytes
        return curves

    def _find_owner(self) -> tuple[str, str]:
        running = self.running
        if self.phase == "forward":
            return ACTIVATIONS_GROUP, running.current
        # Recompute runs in grad mode, and backward makes gradients without it.
        if self.phase == "backward" and torch.is_grad_enabled():
            in_layer = running.current != REST_LAYER
            return ACTIVATIONS_GROUP, running.current if in_layer else running.latest
        running.latest = REST_LAYER
        return TEMPORARIES_GROUP, REST_LAYER


# Optimizer state for models without values.


class OptimizerState:
    """Optimizer state of one model, which is rebuilt for each step, and one optimizer."""

    def __init__(self, values: ValuesInSteps) -> None:
        self._values = values
        # By the layouts of the parameters: those of a rank are others than those of the model.
        self._states: dict[Any, list[dict[str, Any]]] = {}
        self._is_replaced = False
        # Bytes that the first step allocated, and which of them it freed, in order.
        self.first_step: list[tuple[Life, bool]] = []

    def give_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each trainable parameter the state it has after a first step.

        The state tensors are shared between steps, since they have no values. An optimizer that
        makes them anew in each step gets copies, whose release is part of the step.
        """
        parameters = [one for one in parameters_of(optimizer) if one.requires_grad]
        key = tuple(map(_layout, parameters))
        if key not in self._states:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            self.first_step = self._take_first(optimizer, parameters)
            # Copies of containers, in which an optimizer may replace tensors.
            states = [tree_map(lambda one: one, optimizer.state[one]) for one in parameters]
            self._states[key] = states
            take_eagerly(optimizer)
            after = [optimizer.state[parameter] for parameter in parameters]
            self._is_replaced = not {*tensors_in(states)}.issuperset(tensors_in(after))
        for parameter, state in zip(parameters, self._states[key], strict=True):
            given = tree_map_only(Tensor, torch.empty_like, state) if self._is_replaced else state
            optimizer.state[parameter].update(given)

    def _take_first(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
    ) -> list[tuple[Life, bool]]:
        """Take a first step; where it reads conditions, let them hold if that needs more memory."""
        fresh = copy_optimizer(optimizer, {one: one for one in parameters})
        with RankStorages() as storages:
            take_eagerly(optimizer)
        if not self._values.num_conditions:
            return storages.events

        peaks = {}
        for condition in (False, True):
            self._values.condition = condition
            tried = copy_optimizer(fresh, {one: one for one in parameters})
            take_eagerly(tried)
            with RankStorages() as again:
                take_eagerly(tried)
            peaks[condition] = again.bytes_peak
        self._values.condition = peaks[True] >= peaks[False]
        self._values.num_conditions = 0
        optimizer.state.clear()
        optimizer.state.update(fresh.state)
        with RankStorages() as storages:
            take_eagerly(optimizer)
        return storages.events


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return class and dtype of a tensor, and the shape of its part on this rank."""
    return type(tensor), tensor.dtype, *(one.shape for one in local_tensors(tensor))


# Cost of an operation: its FLOPs, and the bytes it reads and writes.


def operation_cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Return the FLOPs and the bytes read and written; both are 0 for a view."""
    inputs, outputs = (
        {part for one in operands(values) for part in dense_parts(one)}
        for values in ((args, kwargs), out)
    )
    mutable = getattr(getattr(func, "_schema", None), "is_mutable", False)
    storages = {value.untyped_storage()._cdata for value in inputs}
    if not mutable and all(value.untyped_storage()._cdata in storages for value in outputs):
        return 0, 0
    moved = sum(value.nbytes for value in inputs | outputs)
    return operation_flops(func, args, kwargs, out), moved


def _attributes_of(owners: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that parameters hold as attributes, such as scales of quantised ones."""
    for leaf in tree_iter([vars(owner) for owner in owners]):
        if isinstance(leaf, Tensor):
            yield leaf
        elif type(leaf).__name__ in STATES_OF_PARAMETERS:
            yield from _attributes_of([leaf])
