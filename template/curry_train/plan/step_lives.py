"""The lives of all storages through one training step, and whose they are.

The step runs on the model itself, whose weights are put back, and on a copy of the optimizer. It is the second one: the
first makes the optimizer's state. Proof: `python -m pytest tests/test_timeline.py`.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..core.layers import REST, RunningLayers, divide
from ..core.measure import Life, LiveStorages
from ..core.untouched import seeded
from .profiler import as_trained
from .report import ACTIVATIONS, BATCH, GRADIENTS, PARAMETERS, PHASES, STATE, TEMPORARIES

Loss = Callable[[nn.Module, Any], Tensor]
ASKS_FOR_DEVICE = (
    torch.ops.prim.device.default
)  # tensors without values do so through the dispatcher, real ones do not


def record_step(
    module: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: str | Sequence[str] | None = None,
    accumulated: bool = False,
    give_state: Callable[[torch.optim.Optimizer], None] | None = None,
    make: "Callable[..., StepLives] | None" = None,
) -> "StepLives":
    """The lives of all storages of the step that `measure_timeline` describes; `accumulated`: the last microstep of
    several, which finds gradients of those before. With `give_state` the first step is not run and every parameter
    that is trained gets its optimizer state from there: the same, where each gets a gradient and the step leaves
    nothing else. This is for tensors without values, and none is put back."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires grad: there is nothing to train"
        )
    optimizer = torch.optim.AdamW(trained) if optimizer is None else optimizer
    stepped = {
        id(parameter): parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    if not any(id(parameter) in stepped for parameter in trained):
        raise ValueError(
            f"the {type(optimizer).__name__} holds no parameter of {type(module).__name__}"
        )
    device, layers = trained[0].device, divide(module, blocks=blocks)
    with (
        as_trained(module),
        _kept({} if give_state else {id(parameter): parameter for parameter in trained} | stepped),
        seeded(0),
        torch.enable_grad(),
    ):
        gc.collect()
        before = 0
        if device.type == "cuda":
            there = _bytes_of([*module.parameters(), *module.buffers(), *_tensors(batch)], device)
            before = torch.cuda.memory_allocated(device) - there
        optimizer = copy.deepcopy(
            optimizer, dict(stepped)
        )  # a copy of its state, over the same parameters
        if give_state is None:
            _take_step(module, batch, loss, optimizer)
        else:
            give_state(optimizer)
        if not accumulated:
            optimizer.zero_grad(set_to_none=True)
        elif give_state is not None:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        gc.collect()
        lives = (make or StepLives)(module, device, layers, before, type(optimizer).__name__)
        lives.follow_all(batch, optimizer)
        with lives.running, lives:
            _take_step(module, batch, loss, optimizer, lives)
        return lives


@contextlib.contextmanager
def _kept(parameters: Mapping[int, Tensor]) -> Iterator[None]:
    """Start without gradients; put values and gradients back."""
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
    """The lives of all storages of a step; owners are pairs of group and layer."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        layers: Mapping[str, nn.Module],
        before: int,
        optimizer: str,
    ) -> None:
        super().__init__(owner=self._owner_now, device=device)
        self.module, self.cuda, self.before = (
            module,
            device if device.type == "cuda" else None,
            before,
        )
        self.running, self.optimizer = RunningLayers(module, layers), optimizer
        self.phase = PHASES[0]
        self.phases: list[str] = []
        self.allocated: list[int] = []
        self.ends: dict[str, int] = {}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.cuda)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_DEVICE:
            return args[0].device
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._read()
        return out

    def follow_all(self, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        """Count what is there before the step."""
        for owner, tensors in (
            (PARAMETERS, self.module.parameters()),
            (STATE, _tensors(list(optimizer.state.values()))),
            (
                GRADIENTS,
                [
                    parameter.grad
                    for parameter in self.module.parameters()
                    if parameter.grad is not None
                ],
            ),
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

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """The last phase."""
        optimizer.step()
        self.own(STATE, _tensors(list(optimizer.state.values())))
        self.end_phase()

    def repeat(self, lives: Iterable[Life], num_operations: int) -> None:
        """The last phase, from an earlier record; its lives count from the first operation of the phase."""
        first, self.num_operations = self.num_operations, self.num_operations + num_operations
        for life in lives:
            died = None if life.died is None else first + life.died
            self.lives.append(Life(life.nbytes, life.owner, first + life.born, died))
        self.phases += [self.phase] * num_operations
        self.allocated += [0] * num_operations
        self.ends[self.phase] = self.num_operations - 1

    def end_phase(self) -> None:
        """A point for what is left when a phase's own variables are gone."""
        self.ends[self.phase] = self.num_operations
        self.num_operations += 1
        self._read()
        self.phase = PHASES[min(PHASES.index(self.phase) + 1, len(PHASES) - 1)]

    def _read(self) -> None:
        self.phases.append(self.phase)
        self.allocated.append(
            torch.cuda.memory_allocated(self.cuda) - self.before if self.cuda else 0
        )

    def _owner_now(self) -> tuple[str, str]:
        if self.phase == "forward":
            return ACTIVATIONS, self.running.current
        if (
            self.phase == "backward" and torch.is_grad_enabled()
        ):  # recomputed; gradients are made without grad mode
            return (
                ACTIVATIONS,
                self.running.latest if self.running.current == REST else self.running.current,
            )
        self.running.latest = REST
        return TEMPORARIES, REST


def _take_step(
    module: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    record: StepLives | None = None,
) -> None:
    value = loss(module, batch)
    if value.dim() or not value.requires_grad:
        what = (
            f"has shape {tuple(value.shape)}"
            if value.dim()
            else "depends on no parameter of the module"
        )
        raise ValueError(
            f"the loss must be one number that {type(module).__name__} can be trained with; it {what}"
        )
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
    if record:
        record.take(optimizer)
    else:
        optimizer.step()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _bytes_of(tensors: list[Tensor], device: torch.device) -> int:
    here = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in here}.values())
