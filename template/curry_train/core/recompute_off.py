"""Recompute switched off for a while, whoever switched it on: this project, a library, or the model itself.

    with recompute_off(model):
        loss(model, batch).backward()    # every activation is kept, and no module runs twice

All of them end in two functions of `torch.utils.checkpoint`, so that is where it is done, for the whole process. What
is compiled already stays as it was compiled. Proof: `python -m pytest tests/test_grad_flow_recompute.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from .checkpointed import Options

NOT_REENTRANT, REENTRANT = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


class _Plain:
    """In place of the autograd function of reentrant checkpointing."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    """In place of the generator that torch runs up to its `yield` before the function, and to its end after it."""
    yield


@contextlib.contextmanager
def recompute_off(model: nn.Module) -> Iterator[None]:
    """Keep all activations of forwards in here. Random numbers, statistics and figures are the same either way."""
    before = {name: getattr(torch_checkpoint, name) for name in (NOT_REENTRANT, REENTRANT)}
    options = [
        (module, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Options) and value.enabled
    ]
    try:
        for (
            module,
            name,
            value,
        ) in options:  # a reentrant block takes a forward in grad mode for its second one
            module.__dict__[name] = replace(value, enabled=False)
        setattr(torch_checkpoint, NOT_REENTRANT, _nothing_around)
        setattr(torch_checkpoint, REENTRANT, _Plain)
        yield
    finally:
        for name, value in before.items():
            setattr(torch_checkpoint, name, value)
        for module, name, value in options:
            module.__dict__[name] = value
