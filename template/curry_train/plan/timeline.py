"""Record a step's storages over time, and name the owner of each byte at the peak.

    timeline = measure_timeline(model, batch, loss)
    print(timeline.table())

Proof: `python -m pytest tests/plan/test_timeline.py`.
"""

import contextlib
import gc
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..core.generators import seeded
from ..core.measure import Loss, as_trained, divide, requested_bytes, tensors_in
from ..primitives.grad_accum import StepInBackward
from ..workloads.optimizers import SteppedOnHost, copy_optimizer, parameters_of
from .optimizers import copy_steps, take_eagerly
from .profiler import (
    ACTIVATIONS_GROUP,
    ALLOCATOR_GROUP,
    GRADIENTS_GROUP,
    MEMORY_GROUPS,
    OPTIMIZER_STATE_GROUP,
    SPECIAL_GROUPS,
    Peak,
    Point,
    Timeline,
    trained_parameters,
)
from .record import OptimizerState, StepLives


def record_step_storages(
    module: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: str | Sequence[str] | None = None,
    accumulated: bool = False,
    state: "OptimizerState | None" = None,
    keeps_output: bool = False,
) -> "StepLives":
    """Record the storages of the step that `measure_timeline` reports.

    `accumulated`: the last microbatch of a window, which finds the gradients of earlier ones.
    `state` is for tensors without values: it sets the optimizer state instead of a first step, and
    no values are restored. The result is the same if every trainable parameter gets a gradient
    and a step leaves no other tensors behind. `keeps_output`: the caller holds what the module
    returned until the next step, as scripts do with their logits.
    """
    trained = trained_parameters(module)
    optimizer = torch.optim.AdamW(trained) if optimizer is None else optimizer
    stepped = parameters_of(optimizer)
    if {*trained}.isdisjoint(stepped):
        raise ValueError(
            f"the {type(optimizer).__name__} holds no parameter of {type(module).__name__}"
        )
    device = trained[0].device
    layers = divide(module, blocks=blocks)
    copied = copy_optimizer(optimizer, {one: one for one in stepped})
    with (
        as_trained(module),
        _keep_parameters(dict.fromkeys([*trained, *stepped] if state is None else [])),
        seeded(0),
        torch.enable_grad(),
        copy_steps(optimizer, copied),
    ):
        gc.collect()
        if state is None:
            run_recorded_step(module, batch, loss, copied)
        else:
            state.give_state(copied)
        _set_gradients(trained, copied, accumulated=accumulated, real=state is None)

        gc.collect()
        lives = StepLives(module, device, layers, copied, state)
        lives.follow_all(batch)
        if lives.cuda:
            # The first step has made the workspaces of the libraries.
            lives.before = requested_bytes(lives.cuda) - lives.bytes_alive
        with holding_output(module, keeps_output), lives.running, lives:
            run_recorded_step(module, batch, loss, copied, lives)
        return lives


def _set_gradients(
    trained: Sequence[Tensor], optimizer: torch.optim.Optimizer, *, accumulated: bool, real: bool
) -> None:
    """Let the gradients exist that a step finds: of earlier microbatches, or never cleared."""
    if not accumulated:
        optimizer.zero_grad(set_to_none=True)
    elif isinstance(optimizer, SteppedOnHost) and optimizer.offload_gradients:
        raise ValueError(
            "offload_gradients=True keeps the gradients of the last microbatch alone: train one "
            "microbatch a step (plan: --microbatch as large as --global-batch), or turn it off"
        )
    stepped = {*parameters_of(optimizer)}
    # An optimizer that steps in backward has freed them in its first step.
    lacks_all = accumulated and (not real or isinstance(optimizer, StepInBackward))
    for parameter in trained:
        if lacks_all or not (real or parameter in stepped):
            parameter.grad = torch.zeros_like(parameter)


@contextlib.contextmanager
def holding_output(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Hold torch's own tensors of the module's latest output until the context ends, if wanted."""
    if not wanted:
        yield
        return
    held: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        held[:] = [t for t in tensors_in(output) if type(t).__module__.startswith("torch")]

    with module.register_forward_hook(keep):
        yield


@contextlib.contextmanager
def _keep_parameters(parameters: Collection[Tensor]) -> Iterator[None]:
    """Drop the gradients of parameters; restore values and gradients at the end."""
    before = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for parameter, value, gradient in before:
                parameter.copy_(value)
                parameter.grad = gradient


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
        raise ValueError(
            f"the loss must be one number that depends on parameters of {type(module).__name__}; "
            f"it has shape {tuple(value.shape)} and requires_grad={value.requires_grad}"
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
        record.gradients = record.own(GRADIENTS_GROUP, gradients)
        record.end_phase()
    del gradients

    take_eagerly(optimizer)
    if record:
        record.own(OPTIMIZER_STATE_GROUP, tensors_in(optimizer.state))
        record.end_phase()


# Timeline: measure the bytes alive through one training step, by owner.


def measure_timeline(module: nn.Module, batch: Any, loss: Loss, **options: Any) -> Timeline:
    """Measure forward, backward and optimizer step, with AdamW if no optimizer is given.

    `options` are those of `record_step_storages`, such as `optimizer`.

    The model itself runs, with everything that it is wrapped in. Its weights, buffers, gradients
    and mode and every generator are restored, and the optimizer is a copy. A module in eval mode is
    measured in training mode. Layers are those of `MemoryProfiler`.
    """
    return timeline_of(record_step_storages(module, batch, loss, **options))


def timeline_of(record: StepLives) -> Timeline:
    """Build the timeline of a recorded step."""
    owners = {
        group: record.curves[group]
        for group in MEMORY_GROUPS
        if group in record.curves or group not in SPECIAL_GROUPS
    }
    totals: Any = sum(owners.values())
    if record.cuda:
        allocated = numpy.array(record.allocated)
        owners[ALLOCATOR_GROUP] = allocated - totals
        totals = allocated

    highest = int(totals.argmax())
    changed = numpy.flatnonzero(numpy.diff(totals, prepend=-1))
    shown = sorted({*changed.tolist(), *record.ends.values()})
    return Timeline(
        model=type(record.module).__name__,
        optimizer=type(record.optimizer).__name__,
        device=str(record.cuda or "cpu"),
        num_operations=len(totals),
        points=tuple(Point(index, record.phases[index], int(totals[index])) for index in shown),
        owners={group: tuple(figures[shown].tolist()) for group, figures in owners.items()},
        after={phase: int(totals[index]) for phase, index in record.ends.items()},
        peak=_build_peak(
            record, highest, {name: int(one[highest]) for name, one in owners.items()}
        ),
    )


def _build_peak(record: StepLives, index: int, owners: dict[str, int]) -> Peak:
    """Build the peak; on CUDA, add what an operation allocated and freed again while it ran."""
    if record.cuda:
        within = requested_bytes(record.cuda, peak=True) - record.before - sum(owners.values())
        owners[ALLOCATOR_GROUP] += within
    layers: dict[str, int] = {}
    for life in record.lives:
        is_alive = life.born <= index and (life.died is None or life.died > index)
        if life.owner[0] == ACTIVATIONS_GROUP and is_alive:
            layers[life.owner[1]] = layers.get(life.owner[1], 0) + life.nbytes
    return Peak(sum(owners.values()), record.phases[index], index, owners, layers)
