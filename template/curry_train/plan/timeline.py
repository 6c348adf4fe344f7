"""Record a step's storages over time, and name the owner of each byte at the peak.

    timeline = measure_timeline(model, batch, loss)
    print(timeline.table())

Proof: `python -m pytest tests/plan/test_timeline.py`.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from ..core.measure import (
    REST_LAYER,
    Life,
    LiveStorages,
    Loss,
    RunningLayers,
    as_trained,
    dense_parts,
    divide,
    operation_flops,
    tensors_in,
)
from ..core.rerun import seeded, unwatched
from ..primitives.grad_accum import StepInBackward
from ..workloads.optimizers import SteppedOnHost
from .optimizers import ValuesInSteps, copy_optimizer, copy_steps, take_eagerly
from .profiler import (
    ACTIVATIONS_GROUP,
    ALLOCATOR_GROUP,
    BATCH_GROUP,
    GRADIENTS_GROUP,
    MEMORY_GROUPS,
    OPTIMIZER_STATE_GROUP,
    PARAMETERS_GROUP,
    RANK_GROUPS,
    STEP_PHASES,
    TEMPORARIES_GROUP,
    Peak,
    Point,
    Timeline,
)

# Record every storage of one training step: its owner, and when it is made and freed.


MATRIX_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}
# Classes of objects in which bitsandbytes keeps what its parameters are scaled with.
STATES_OF_PARAMETERS = ("QuantState", "MatmulLtState")


def record_step_storages(
    module: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: str | Sequence[str] | None = None,
    accumulated: bool = False,
    steps: "OptimizerSteps | None" = None,
    keeps_output: bool = False,
) -> "StepLives":
    """Record the storages of the step that `measure_timeline` reports.

    `accumulated`: the last microbatch of a window, which finds the gradients of earlier ones.
    `steps` is for tensors without values: it sets the optimizer state instead of a first step, and
    no values are restored. The result is the same if every trainable parameter gets a gradient
    and a step leaves no other tensors behind. `keeps_output`: the caller holds what the module
    returned until the next step, as scripts do with their logits.
    """
    trained = _trained_parameters(module)
    optimizer = torch.optim.AdamW(trained) if optimizer is None else optimizer
    stepped = _stepped_parameters(optimizer)
    if not any(id(p) in stepped for p in trained):
        raise ValueError(
            f"the {type(optimizer).__name__} holds no parameter of {type(module).__name__}"
        )
    device = trained[0].device
    layers = divide(module, blocks=blocks)
    restored = {}
    if steps is None:
        restored = {id(p): p for p in trained} | stepped
    with (
        as_trained(module),
        _kept(restored),
        seeded(0),
        torch.enable_grad(),
        contextlib.ExitStack() as stack,
    ):
        gc.collect()
        before = 0
        if device.type == "cuda":
            own = _bytes_of([*module.parameters(), *module.buffers(), *_tensors(batch)], device)
            before = torch.cuda.memory_allocated(device) - own

        original, optimizer = optimizer, copy_optimizer(optimizer, stepped)
        stack.enter_context(copy_steps(original, optimizer))
        if steps is None:
            run_recorded_step(module, batch, loss, optimizer)
        else:
            steps.give_state(optimizer)
        _set_gradients(trained, optimizer, accumulated=accumulated, real=steps is None)

        gc.collect()
        lives = StepLives(module, device, layers, before, type(optimizer).__name__, steps)
        lives.follow_all(batch, optimizer)
        held: list[Tensor] = []
        with lives.running, lives, holding_output(module, held if keeps_output else None):
            run_recorded_step(module, batch, loss, optimizer, lives)
        return lives


def _set_gradients(
    trained: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    accumulated: bool,
    real: bool,
) -> None:
    """Let the gradients exist that a step finds: of earlier microbatches, or never cleared."""
    if not accumulated:
        optimizer.zero_grad(set_to_none=True)
    elif isinstance(optimizer, SteppedOnHost) and optimizer.offload_gradients:
        raise ValueError(
            "offload_gradients=True keeps the gradients of the last microbatch alone: train one "
            "microbatch a step (plan: --microbatch as large as --global-batch), or turn it off"
        )
    stepped = _stepped_parameters(optimizer)
    for parameter in trained:
        if not real and (accumulated or id(parameter) not in stepped):
            parameter.grad = torch.empty_like(parameter)
        elif real and accumulated and isinstance(optimizer, StepInBackward):
            # The first step has freed them.
            parameter.grad = torch.zeros_like(parameter)


@contextlib.contextmanager
def holding_output(module: nn.Module, held: list[Tensor] | None) -> Iterator[None]:
    """Keep torch's own tensors of the module's latest output in `held`, if it is given."""
    if held is None:
        yield
        return

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        held[:] = [t for t in tensors_in(output) if type(t).__module__.startswith("torch")]

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _beside(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that parameters hold as attributes, such as scales of quantised ones."""
    seen: set[int] = set()
    found: list[Any] = [list(vars(parameter).values()) for parameter in parameters]
    while found:
        value = found.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            found += value
        elif isinstance(value, dict):
            found += value.values()
        elif type(value).__name__ in STATES_OF_PARAMETERS:
            found += vars(value).values()


def _trained_parameters(module: nn.Module) -> list[Tensor]:
    trained: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires grad: "
            "there is nothing to train"
        )
    return trained


def _stepped_parameters(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Return the parameters of an optimizer by id."""
    return {id(parameter): parameter for parameter in _parameters(optimizer)}


@contextlib.contextmanager
def _kept(parameters: Mapping[int, Tensor]) -> Iterator[None]:
    """Drop the gradients of parameters; restore values and gradients at the end."""
    before = [
        (parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters.values()
    ]
    try:
        for parameter in parameters.values():
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for parameter, value, gradient in before:
                parameter.copy_(value)
                parameter.grad = gradient


class StepLives(LiveStorages):
    """Record the storages of a step, and the costs of each operation of forward and backward.

    The owner of a storage is a pair of group and layer. With `steps`, an optimizer step that was
    recorded before is replayed from the record.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        layers: Mapping[str, nn.Module],
        before: int,
        optimizer: str,
        steps: "OptimizerSteps | None" = None,
    ) -> None:
        super().__init__(owner=self._owner_now, device=device)
        self.steps = steps
        # FLOPs of each operation, and the bytes it reads and writes.
        self.flops: list[int] = []
        self.moved: list[int] = []
        self.module = module
        self.cuda = device if device.type == "cuda" else None
        self.before = before
        self.running = RunningLayers(module, layers)
        self.optimizer = optimizer
        self.phase = STEP_PHASES[0]
        self.phases: list[str] = []
        self.allocated: list[int] = []
        self.ends: dict[str, int] = {}
        # Numbers of events at the end of each phase, and at the first product of each thread.
        self.event_ends: dict[str, int] = {}
        self.products: dict[str, int] = {}
        # Storages that exist before the step, and the gradients after it.
        self.given: list[Life] = []
        self.gradients: list[Life] = []
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.cuda)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in MATRIX_PRODUCTS:
            # Autograd multiplies on a thread of its own.
            thread = "backward" if self.phase == "backward" else "forward"
            self.products.setdefault(thread, len(self.events))
        with unwatched():
            out = super().run(func, args, kwargs)
            self._read()
            if self.phase != "step":
                flops, moved = operation_cost(func, args, kwargs, out)
                self.flops.append(flops)
                self.moved.append(moved)
        return out

    def follow_all(self, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        """Count the tensors that exist before the step."""
        parameters = list(self.module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for owner, tensors in (
            (PARAMETERS_GROUP, [*parameters, *_beside(parameters)]),
            (OPTIMIZER_STATE_GROUP, _tensors(list(optimizer.state.values()))),
            (GRADIENTS_GROUP, gradients),
            (BATCH_GROUP, [*self.module.buffers(), *_tensors(batch)]),
        ):
            for tensor in tensors:
                self.follow(tensor, owner=(owner, REST_LAYER))
        self.given = list(self.lives)

    def own(self, group: str, tensors: Iterable[Tensor]) -> None:
        """Assign the tensors that the step made to a group."""
        for tensor in tensors:
            for life in self.lives_of(tensor):
                if life.owner[0] != PARAMETERS_GROUP:
                    life.owner = (group, REST_LAYER)

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the last phase, the optimizer step, or replay it from an equal one."""
        if self.steps is None:
            self.take_now(optimizer)
        else:
            self.steps.take(optimizer, self)

    def take_now(self, optimizer: torch.optim.Optimizer) -> None:
        take_eagerly(optimizer)
        self.own(OPTIMIZER_STATE_GROUP, _tensors(list(optimizer.state.values())))
        self.end_phase()

    def repeat(
        self, lives: Iterable[Life], events: Iterable[tuple[int, bool]], num_operations: int
    ) -> None:
        """Replay the last phase from a record whose operations count from the phase's first one.

        `events` name the lives by their index.
        """
        first = self.num_operations
        self.num_operations += num_operations
        again = []
        for life in lives:
            died = None if life.died is None else first + life.died
            again.append(Life(life.nbytes, life.owner, first + life.born, died))
        self.lives += again
        self.events += [(again[index], made) for index, made in events]
        self.phases += [self.phase] * num_operations
        self.allocated += [0] * num_operations
        self.ends[self.phase] = self.num_operations - 1
        self.event_ends[self.phase] = len(self.events)

    def end_phase(self) -> None:
        """Add a point for the bytes that remain when the local variables of a phase are gone."""
        self.settle()
        self.ends[self.phase] = self.num_operations
        self.event_ends[self.phase] = len(self.events)
        self.num_operations += 1
        self._read()
        self.phase = STEP_PHASES[min(STEP_PHASES.index(self.phase) + 1, len(STEP_PHASES) - 1)]

    def _read(self) -> None:
        self.phases.append(self.phase)
        self.allocated.append(
            torch.cuda.memory_allocated(self.cuda) - self.before if self.cuda else 0
        )

    def _owner_now(self) -> tuple[str, str]:
        if self.phase == "forward":
            return ACTIVATIONS_GROUP, self.running.current
        # Recompute runs in grad mode, and backward makes gradients without it.
        if self.phase == "backward" and torch.is_grad_enabled():
            in_layer = self.running.current != REST_LAYER
            return ACTIVATIONS_GROUP, self.running.current if in_layer else self.running.latest
        self.running.latest = REST_LAYER
        return TEMPORARIES_GROUP, REST_LAYER


# Cache of optimizer state and optimizer steps, for models without values.

Layouts = tuple[Any, ...]


class OptimizerSteps:
    """Optimizer state and steps of one model, which is rebuilt for each step, and one optimizer."""

    def __init__(
        self, values: ValuesInSteps, *, storages: Callable[[], LiveStorages] = LiveStorages
    ) -> None:
        self._values = values
        self._storages = storages
        self._states: dict[Layouts, list[dict[str, Any]]] = {}
        self._recorded: dict[
            tuple[Layouts, Layouts], tuple[list[Life], list[tuple[int, bool]], int]
        ] = {}
        self._is_replaced = False
        # Bytes that the first step allocated, and which of them it freed, in order.
        self.first_step: list[tuple[Life, bool]] = []

    def give_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each trainable parameter the state it has after a first step.

        The state tensors are shared between steps, since they have no values. An optimizer that
        makes them anew in each step gets copies, whose release is part of the step.
        """
        parameters = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
        key = _layouts(parameters)
        if key not in self._states:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            self.first_step = self._take_first(optimizer, parameters)
            self._states[key] = [dict(optimizer.state[parameter]) for parameter in parameters]
            take_eagerly(optimizer)
            self._is_replaced = any(
                value is not before.get(name)
                for parameter, before in zip(parameters, self._states[key], strict=True)
                for name, value in optimizer.state[parameter].items()
                if isinstance(value, Tensor)
            )
        for parameter, state in zip(parameters, self._states[key], strict=True):
            given = tree_map(_copy_of, state) if self._is_replaced else state
            optimizer.state[parameter].update(given)

    def _take_first(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
    ) -> list[tuple[Life, bool]]:
        """Take a first step; where it reads conditions, let them hold if that needs more memory."""
        fresh = copy_optimizer(optimizer, {id(one): one for one in parameters})
        with self._storages() as storages:
            take_eagerly(optimizer)
        if not self._values.num_conditions:
            return storages.events

        peaks = {}
        for condition in (False, True):
            self._values.condition = condition
            tried = copy_optimizer(fresh, {id(one): one for one in parameters})
            take_eagerly(tried)
            with self._storages() as again:
                take_eagerly(tried)
            peaks[condition] = again.bytes_peak
        self._values.condition = peaks[True] >= peaks[False]
        self._values.num_conditions = 0
        optimizer.state.clear()
        optimizer.state.update(fresh.state)
        with self._storages() as storages:
            take_eagerly(optimizer)
        return storages.events

    def take(self, optimizer: torch.optim.Optimizer, record: StepLives) -> None:
        """Replay the optimizer step recorded for gradients of this layout, or record it now."""
        parameters = _parameters(optimizer)
        key = _layouts(parameters), _layouts([one.grad for one in parameters])
        if key in self._recorded:
            record.repeat(*self._recorded[key])
            return

        first = record.num_operations
        first_event = len(record.events)
        before = list(record.lives)
        record.take_now(optimizer)
        # A step that frees earlier storages can't be replayed from its own storages alone.
        if not any(life.died is not None and life.died >= first for life in before):
            made = record.lives[len(before) :]
            lives = [_from(first, life) for life in made]
            places = {id(life): place for place, life in enumerate(made)}
            events = [(places[id(life)], is_made) for life, is_made in record.events[first_event:]]
            self._recorded[key] = lives, events, record.num_operations - first


def _copy_of(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, Tensor) else value


def _from(first: int, life: Life) -> Life:
    """Count the operations of a life from `first`."""
    died = None if life.died is None else life.died - first
    return replace(life, born=life.born - first, died=died)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _layouts(tensors: Sequence[Tensor | None]) -> Layouts:
    """Return shape, stride and dtype of each tensor, as a key."""
    return tuple(None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in tensors)


# Cost of an operation: its FLOPs, and the bytes it reads and writes.


def operation_cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Return the FLOPs and the bytes read and written; both are 0 for a view."""
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    _find(args, inputs)
    _find(kwargs, inputs)
    _find(out, outputs)
    mutable = getattr(getattr(func, "_schema", None), "is_mutable", False)
    storages = {value.untyped_storage()._cdata for value in inputs.values()}
    if not mutable and all(
        value.untyped_storage()._cdata in storages for value in outputs.values()
    ):
        return 0, 0
    moved = sum(value.numel() * value.itemsize for value in (inputs | outputs).values())
    return operation_flops(func, args, kwargs, out), moved


def _find(value: Any, found: dict[int, Tensor]) -> None:
    """Collect the tensors in nested lists, tuples and dicts; of a sparse one indices and values."""
    if isinstance(value, Tensor):
        for tensor in dense_parts(value):
            found[id(tensor)] = tensor
    elif isinstance(value, list | tuple):
        for item in value:
            _find(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _find(item, found)


def run_recorded_step(
    module: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    record: StepLives | None = None,
    *,
    needs_gradients: bool = True,
) -> None:
    """Run forward, backward and optimizer step, and mark the phases in the record."""
    value = loss(module, batch)
    if value.dim() or not value.requires_grad:
        problem = "depends on no parameter of the module"
        if value.dim():
            problem = f"has shape {tuple(value.shape)}"
        raise ValueError(
            f"the loss must be one number that {type(module).__name__} can be trained with; "
            f"it {problem}"
        )

    if record:
        record.end_phase()
    with torch.no_grad():
        start = torch.ones_like(value)
    value.backward(start)
    del start

    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    frees = isinstance(optimizer, StepInBackward | SteppedOnHost)
    if needs_gradients and not gradients and not frees:
        raise ValueError(
            f"backward left no gradient in {type(module).__name__}: let the loss use the module "
            "that it gets as its argument"
        )
    if record:
        record.own(GRADIENTS_GROUP, gradients)
        record.gradients = [life for tensor in gradients for life in record.lives_of(tensor)]
        record.end_phase()
    del gradients

    if record:
        record.take(optimizer)
    else:
        take_eagerly(optimizer)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _bytes_of(tensors: list[Tensor], device: torch.device) -> int:
    """Sum the bytes of the distinct storages on a device."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# Timeline: measure the bytes alive through one training step, by owner.


def measure_timeline(
    module: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: str | Sequence[str] | None = None,
) -> Timeline:
    """Measure forward, backward and optimizer step, with AdamW if no optimizer is given.

    The model itself runs, with everything that it is wrapped in. Its weights, buffers, gradients
    and mode and every generator are restored, and the optimizer is a copy. A module in eval mode is
    measured in training mode. Layers are those of `MemoryProfiler`.
    """
    lives = record_step_storages(module, batch, loss, optimizer=optimizer, blocks=blocks)
    return timeline_of(lives, type(module).__name__)


def timeline_of(record: StepLives, model: str) -> Timeline:
    """Build the timeline of a recorded step."""
    length = len(record.phases)
    changes = {group: [0] * (length + 1) for group in MEMORY_GROUPS}
    for life in record.lives:
        changes[life.owner[0]][life.born] += life.nbytes
        changes[life.owner[0]][length if life.died is None else life.died] -= life.nbytes

    owners = {
        group: list(accumulate(change[:length]))
        for group, change in changes.items()
        if group not in RANK_GROUPS or any(change)
    }
    totals = [sum(figures) for figures in zip(*owners.values(), strict=True)]
    if record.cuda:
        owners[ALLOCATOR_GROUP] = [
            allocated - known for allocated, known in zip(record.allocated, totals, strict=True)
        ]
        totals = record.allocated
    else:
        del owners[ALLOCATOR_GROUP]

    highest = totals.index(max(totals))
    at_peak = {group: figures[highest] for group, figures in owners.items()}
    shown = [
        index
        for index, total in enumerate(totals)
        if index == 0 or total != totals[index - 1] or index in record.ends.values()
    ]
    return Timeline(
        model=model,
        optimizer=record.optimizer,
        device=str(record.cuda or "cpu"),
        num_operations=length,
        points=tuple(Point(index, record.phases[index], totals[index]) for index in shown),
        owners={group: _figures_at(figures, shown) for group, figures in owners.items()},
        after={phase: totals[index] for phase, index in record.ends.items()},
        peak=_peak(record, highest, at_peak),
    )


def _figures_at(figures: Sequence[int], indices: Sequence[int]) -> tuple[int, ...]:
    return tuple(figures[index] for index in indices)


def _peak(record: StepLives, index: int, owners: dict[str, int]) -> Peak:
    """Build the peak; on CUDA, add what an operation allocated and freed again while it ran."""
    if record.cuda:
        within = torch.cuda.max_memory_allocated(record.cuda) - record.before - sum(owners.values())
        owners[ALLOCATOR_GROUP] += within
    layers: dict[str, int] = {}
    for life in record.lives:
        if life.owner[0] == ACTIVATIONS_GROUP and _alive(life, index):
            layers[life.owner[1]] = layers.get(life.owner[1], 0) + life.nbytes
    return Peak(sum(owners.values()), record.phases[index], index, owners, layers)


def _alive(life: Life, index: int) -> bool:
    return life.born <= index and (life.died is None or life.died > index)
