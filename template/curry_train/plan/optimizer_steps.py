"""Cache of optimizer state and optimizer steps, for models without values.

The state is made once, and the step is recorded once for each layout of gradients, because neither
depends on how the blocks were run.

Proof: `python -m pytest tests/test_optimizer_steps.py tests/test_estimate.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.measure import Life
from .step_lives import StepLives

Layouts = tuple[Any, ...]


class OptimizerSteps:
    """Optimizer state and steps of one model, which is rebuilt for each step, and one optimizer."""

    def __init__(self) -> None:
        self._states: dict[Layouts, list[dict[str, Any]]] = {}
        self._steps: dict[tuple[Layouts, Layouts], tuple[list[Life], int]] = {}

    def give_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each trainable parameter the state it has after a first step.

        The state tensors are shared between steps, since they have no values.
        """
        parameters = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
        key = _layouts(parameters)
        if key not in self._states:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            self._states[key] = [dict(optimizer.state[parameter]) for parameter in parameters]
        for parameter, state in zip(parameters, self._states[key], strict=True):
            optimizer.state[parameter].update(state)

    def take(self, optimizer: torch.optim.Optimizer, record: StepLives) -> None:
        """Replay the optimizer step recorded for gradients of this layout, or record it now."""
        parameters = _parameters(optimizer)
        key = _layouts(parameters), _layouts([parameter.grad for parameter in parameters])
        if key in self._steps:
            record.repeat(*self._steps[key])
            return

        first = record.num_operations
        before = list(record.lives)
        StepLives.take(record, optimizer)
        # A step that frees earlier storages can't be replayed from its own storages alone.
        if not any(life.died is not None and life.died >= first for life in before):
            lives = [_from(first, life) for life in record.lives[len(before) :]]
            self._steps[key] = lives, record.num_operations - first


def _from(first: int, life: Life) -> Life:
    """Count the operations of a life from `first`."""
    died = None if life.died is None else life.died - first
    return replace(life, born=life.born - first, died=died)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _layouts(tensors: Sequence[Tensor | None]) -> Layouts:
    """Return shape, stride and dtype of each tensor, as a key."""
    return tuple(None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in tensors)
