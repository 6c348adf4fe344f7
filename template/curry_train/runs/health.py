"""Check that a state is finite before it is saved.

A state with NaN or infinite values is never saved, so that it cannot replace a good checkpoint.

Proof: `python -m pytest tests/test_saving_policy.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .snapshot import State


def what_is_wrong(state: State, metrics: Mapping[str, Any]) -> str | None:
    """Describe the first metric or parameter that is not finite; None if all are finite.

    Buffers and moments are not checked: masks among the buffers are infinite in sound models, and
    NaN in a moment reaches its parameter in the same step.
    """
    for name, value in metrics.items():
        if value is not None and not math.isfinite(number_of(value)):
            return f"{name} is {number_of(value)}"
    model = getattr(state, "model", None)
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    parameters = {}
    for name, parameter in named:
        tensor = _local(parameter.detach())
        if tensor.is_floating_point() or tensor.is_complex():
            parameters[name] = tensor
    if not parameters or all_finite(list(parameters.values())):
        return None

    # Search for the name only after the cheap check of all parameters together has failed.
    for name, tensor in parameters.items():
        if not all_finite([tensor]):
            return f"{name} is not finite"
    return "a parameter is not finite"


def number_of(value: Any) -> float:
    """Convert a number or a tensor, which may still require grad, to a float."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether all tensors are finite; synchronizes only once with each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(torch.isfinite(tensor).all())
    return all(bool(torch.stack(flags).all()) for flags in by_device.values())


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded parameter, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = to_local() if to_local is not None else tensor
    return local
