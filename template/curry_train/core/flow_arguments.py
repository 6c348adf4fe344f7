"""What grad-flow is given: checked, with words for what can't be probed; and an optimizer that tells of `zero_grad`.

Proof: `python -m pytest tests/test_grad_flow_layers.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

RECOMPUTE = ("filter", "off")
REFUSED = {
    "FullyShardedDataParallel": "keeps parameters in flat parts that no layer can be told from: use fully_shard",
    "DataParallel": "runs copies of the model, which hooks do not follow: use DistributedDataParallel",
}


@contextlib.contextmanager
def told_of_zero_grad(optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> Iterator[None]:
    """`call` before each `zero_grad` of an optimizer; torch has hooks for its steps alone."""
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def told(*arguments: Any, **keywords: Any) -> None:
        call()
        zero_grad(*arguments, **keywords)

    own = optimizer.__dict__.get("zero_grad")
    optimizer.__dict__["zero_grad"] = told
    try:
        yield
    finally:
        if (
            optimizer.__dict__.get("zero_grad") is told
        ):  # else somebody has put theirs around it, and keeps it
            del optimizer.__dict__["zero_grad"]
            if own is not None:
                optimizer.__dict__["zero_grad"] = own


def check_arguments(model: Any, every: Any, recompute: Any, first_step: Any, scaler: Any) -> None:
    """Say what can't be probed, before a step is run."""
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
    """One, several or none; each has to hold parameters of the model."""
    optimizers = (
        [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    )
    own = set(model.parameters())
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"an optimizer is needed, got {type(optimizer).__name__}; pass the one it wraps"
            )
        if not any(member in own for group in optimizer.param_groups for member in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} holds no parameter of this model: make it after the model is moved, "
                "sharded or adapted, and pass it here then"
            )
    return optimizers
