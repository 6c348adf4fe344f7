"""Is a state worth going on from? One that holds NaN is saved nowhere, so that it never takes the place of a good one.

Proof: `python -m pytest tests/test_saving_policy.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .snapshot import State


def what_is_wrong(state: State, metrics: Mapping[str, Any]) -> str | None:
    """What is wrong, in words; None where every metric and every parameter is finite.

    Parameters alone: masks among the buffers are infinite in sound models, and NaN in a moment is in its parameter
    after the same step.
    """
    for name, value in metrics.items():
        if value is not None and not math.isfinite(number_of(value)):
            return f"{name} is {number_of(value)}"
    model = getattr(state, "model", None)
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    held = [(name, _local(parameter.detach())) for name, parameter in named]
    sums = [
        (name, tensor) for name, tensor in held if tensor.is_floating_point() or tensor.is_complex()
    ]
    if not sums or all_finite([tensor for _, tensor in sums]):
        return None
    return f"{next((name for name, tensor in sums if not all_finite([tensor])), 'a parameter')} is not finite"


def number_of(value: Any) -> float:
    """A loss as the loop has it may still hold its graph."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def all_finite(tensors: list[Tensor]) -> bool:
    """One answer from each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(torch.isfinite(tensor).all())
    return all(bool(torch.stack(answers).all()) for answers in by_device.values())


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded parameter."""
    to_local = getattr(tensor, "to_local", None)
    found: Tensor = to_local() if to_local is not None else tensor
    return found
