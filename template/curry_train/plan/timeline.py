"""Every byte that is alive through one training step, and whose the bytes at the peak are.

    timeline = measure_timeline(model, batch, loss)
    print(timeline.table())

The step runs on the model itself, whose weights are put back, and on a copy of the optimizer. It is the second one: the
first makes the optimizer's state.
Proof: `python -m pytest tests/test_timeline.py`.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..core.layers import REST, RunningLayers, divide
from ..core.measure import Life, LiveStorages
from ..core.untouched import seeded
from .profiler import as_trained
from .report import (
    ACTIVATIONS,
    ALLOCATOR,
    BATCH,
    GRADIENTS,
    GROUPS,
    PARAMETERS,
    PHASES,
    STATE,
    TEMPORARIES,
    Peak,
    Point,
    Timeline,
)

__all__ = ["Peak", "Point", "Timeline", "measure_timeline"]

Loss = Callable[[nn.Module, Any], Tensor]


def measure_timeline(
    module: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: str | Sequence[str] | None = None,
) -> Timeline:
    """Follow forward, backward and optimizer step, with AdamW if no optimizer is given.

    The model itself runs, so that whatever it is wrapped in runs too; its weights, buffers, gradients and mode and
    every generator are put back, and the optimizer is a copy. A module in eval mode is measured in training mode.
    Layers are those of `MemoryProfiler`.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameter that requires grad: there is nothing to train")
    optimizer = torch.optim.AdamW(trained) if optimizer is None else optimizer
    stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in stepped for parameter in trained):
        raise ValueError(f"the {type(optimizer).__name__} holds no parameter of {type(module).__name__}")
    device, layers = trained[0].device, divide(module, blocks=blocks)
    with (
        as_trained(module),
        _kept({id(parameter): parameter for parameter in trained} | stepped),
        seeded(0),
        torch.enable_grad(),
    ):
        gc.collect()
        before = 0
        if device.type == "cuda":
            there = _bytes_of([*module.parameters(), *module.buffers(), *_tensors(batch)], device)
            before = torch.cuda.memory_allocated(device) - there
        optimizer = copy.deepcopy(optimizer, dict(stepped))  # a copy of its state, over the same parameters
        _take_step(module, batch, loss, optimizer)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        record = _Record(module, device, layers, before)
        record.follow_all(batch, optimizer)
        with record.running, record:
            _take_step(module, batch, loss, optimizer, record)
        return _timeline(record, type(module).__name__, type(optimizer).__name__)


@contextlib.contextmanager
def _kept(parameters: Mapping[int, Tensor]) -> Iterator[None]:
    """Start without gradients; put values and gradients back."""
    before = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters.values()]
    try:
        for parameter in parameters.values():
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for parameter, value, gradient in before:
                parameter.copy_(value)
                parameter.grad = gradient


class _Record(LiveStorages):
    """The lives of all storages of a step; owners are pairs of group and layer."""

    def __init__(self, module: nn.Module, device: torch.device, layers: Mapping[str, nn.Module], before: int) -> None:
        super().__init__(owner=self._owner_now, device=device)
        self.module, self.cuda, self.before = module, device if device.type == "cuda" else None, before
        self.running = RunningLayers(module, layers)
        self.phase = PHASES[0]
        self.phases: list[str] = []
        self.allocated: list[int] = []
        self.ends: dict[str, int] = {}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.cuda)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._read()
        return out

    def follow_all(self, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        """Count what is there before the step."""
        for owner, tensors in (
            (PARAMETERS, self.module.parameters()),
            (STATE, _tensors(list(optimizer.state.values()))),
            (BATCH, [*self.module.buffers(), *_tensors(batch)]),
        ):
            for tensor in tensors:
                self.follow(tensor, owner=(owner, REST))

    def own(self, group: str, tensors: Iterable[Tensor]) -> None:
        """Say whose tensors these turned out to be, as far as the step made them."""
        for tensor in tensors:
            for life in self.lives_of(tensor):
                if life.owner[0] != PARAMETERS:
                    life.owner = (group, REST)

    def end_phase(self) -> None:
        """A point for what is left when a phase's own variables are gone."""
        self.ends[self.phase] = self.num_operations
        self.num_operations += 1
        self._read()
        self.phase = PHASES[min(PHASES.index(self.phase) + 1, len(PHASES) - 1)]

    def _read(self) -> None:
        self.phases.append(self.phase)
        self.allocated.append(torch.cuda.memory_allocated(self.cuda) - self.before if self.cuda else 0)

    def _owner_now(self) -> tuple[str, str]:
        if self.phase == "forward":
            return ACTIVATIONS, self.running.current
        if self.phase == "backward" and torch.is_grad_enabled():  # recomputed; gradients are made without grad mode
            return ACTIVATIONS, self.running.latest if self.running.current == REST else self.running.current
        self.running.latest = REST
        return TEMPORARIES, REST


def _take_step(
    module: nn.Module, batch: Any, loss: Loss, optimizer: torch.optim.Optimizer, record: _Record | None = None
) -> None:
    value = loss(module, batch)
    if value.dim() or not value.requires_grad:
        what = f"has shape {tuple(value.shape)}" if value.dim() else "depends on no parameter of the module"
        raise ValueError(f"the loss must be one number that {type(module).__name__} can be trained with; it {what}")
    if record:
        record.end_phase()
    with torch.no_grad():
        start = torch.ones_like(value)
    value.backward(start)
    del start
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not gradients:
        raise ValueError(
            f"backward left no gradient in {type(module).__name__}: let the loss use the module that it is given"
        )
    if record:
        record.own(GRADIENTS, gradients)
        record.end_phase()
    del gradients
    optimizer.step()
    if record:
        record.own(STATE, _tensors(list(optimizer.state.values())))
        record.end_phase()


def _timeline(record: _Record, model: str, optimizer: str) -> Timeline:
    length = len(record.phases)
    changes = {group: [0] * (length + 1) for group in GROUPS}
    for life in record.lives:
        changes[life.owner[0]][life.born] += life.nbytes
        changes[life.owner[0]][length if life.died is None else life.died] -= life.nbytes
    owners = {group: list(accumulate(change[:length])) for group, change in changes.items()}
    totals = [sum(figures) for figures in zip(*owners.values(), strict=True)]
    if record.cuda:
        owners[ALLOCATOR] = [found - known for found, known in zip(record.allocated, totals, strict=True)]
        totals = record.allocated
    else:
        del owners[ALLOCATOR]
    highest = totals.index(max(totals))
    kept = [
        index
        for index, total in enumerate(totals)
        if index == 0 or total != totals[index - 1] or index in record.ends.values()
    ]
    return Timeline(
        model=model,
        optimizer=optimizer,
        device=str(record.cuda or "cpu"),
        num_operations=length,
        points=tuple(Point(index, record.phases[index], totals[index]) for index in kept),
        owners={group: tuple(figures[index] for index in kept) for group, figures in owners.items()},
        after={phase: totals[index] for phase, index in record.ends.items()},
        peak=_peak(record, highest, {group: figures[highest] for group, figures in owners.items()}),
    )


def _peak(record: _Record, index: int, owners: dict[str, int]) -> Peak:
    """The point with the most bytes; on CUDA, what was allocated and freed within an operation is added to it."""
    if record.cuda:
        within = torch.cuda.max_memory_allocated(record.cuda) - record.before - sum(owners.values())
        owners[ALLOCATOR] += within
    layers: dict[str, int] = {}
    for life in record.lives:
        if life.owner[0] == ACTIVATIONS and _alive(life, index):
            layers[life.owner[1]] = layers.get(life.owner[1], 0) + life.nbytes
    return Peak(sum(owners.values()), record.phases[index], index, owners, layers)


def _alive(life: Life, index: int) -> bool:
    return life.born <= index and (life.died is None or life.died > index)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _bytes_of(tensors: list[Tensor], device: torch.device) -> int:
    here = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in here}.values())
