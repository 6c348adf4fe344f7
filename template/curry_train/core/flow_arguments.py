"""Checks of grad-flow's arguments, and a hook on an optimizer's `zero_grad`.

Proof: `python -m pytest tests/test_grad_flow_layers.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

RECOMPUTE = ("filter", "off")
# Wrappers that can't be probed, with the reason and the alternative.
REFUSED = {
    "FullyShardedDataParallel": (
        "flattens parameters, which then can't be assigned to layers: use fully_shard"
    ),
    "DataParallel": "runs replicas of the model, which are not probed: use DistributedDataParallel",
}


@contextlib.contextmanager
def told_of_zero_grad(optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> Iterator[None]:
    """Run `call` before each `zero_grad` of an optimizer; torch has hooks only for its steps."""
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def call_first(*arguments: Any, **keywords: Any) -> None:
        call()
        zero_grad(*arguments, **keywords)

    previous = optimizer.__dict__.get("zero_grad")
    optimizer.__dict__["zero_grad"] = call_first
    try:
        yield
    finally:
        # If other code has wrapped it in between, that wrapper stays.
        if optimizer.__dict__.get("zero_grad") is call_first:
            del optimizer.__dict__["zero_grad"]
            if previous is not None:
                optimizer.__dict__["zero_grad"] = previous


def check_arguments(model: Any, every: Any, recompute: Any, first_step: Any, scaler: Any) -> None:
    """Raise an error for arguments that are invalid, and models that can't be probed."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"GradFlow probes a module, got {type(model).__name__}")
    for name, value, least in (("every", every, 1), ("first_step", first_step, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number from {least} up, got {value!r}")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
    if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
        raise ValueError(f"scaler must be a GradScaler, got {type(scaler).__name__}")
    for module in model.modules():
        advice = REFUSED.get(type(module).__name__)
        if advice is not None:
            raise ValueError(f"{type(module).__name__} {advice}")


def optimizers_of(model: nn.Module, given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list; each must hold parameters of the model."""
    if given is None:
        return []
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    parameters = set(model.parameters())
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"an optimizer is needed, got {type(optimizer).__name__}; pass the one it wraps"
            )
        members = [member for group in optimizer.param_groups for member in group["params"]]
        if not any(member in parameters for member in members):
            raise ValueError(
                f"{type(optimizer).__name__} holds no parameter of this model: create it after the "
                "model is moved, sharded or adapted, and pass that optimizer"
            )
    return optimizers
