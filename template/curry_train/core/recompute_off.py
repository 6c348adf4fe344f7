"""Temporarily switch off recompute, whether this project, a library or the model applied it.

    with recompute_off(model):
        loss(model, batch).backward()    # every activation is saved, and no module runs twice

All of them call two functions of `torch.utils.checkpoint`, so those are replaced, for the whole
process. Code that is compiled already does not change.

Proof: `python -m pytest tests/test_grad_flow_recompute.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from .checkpointed import Options

NOT_REENTRANT = "_checkpoint_without_reentrant_generator"
REENTRANT = "CheckpointFunction"


class _Plain:
    """Replacement for the autograd function of reentrant checkpointing."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    """Replacement for the generator that torch runs around a non-reentrant checkpoint."""
    yield


@contextlib.contextmanager
def recompute_off(model: nn.Module) -> Iterator[None]:
    """Save all activations of forwards inside the context.

    Random numbers, statistics and results are the same as with recompute.
    """
    before = {name: getattr(torch_checkpoint, name) for name in (NOT_REENTRANT, REENTRANT)}
    options = [
        (module, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Options) and value.enabled
    ]
    try:
        # Our own options are disabled too: a reentrant block takes a forward in grad mode for its
        # second one.
        for module, name, value in options:
            module.__dict__[name] = replace(value, enabled=False)
        setattr(torch_checkpoint, NOT_REENTRANT, _nothing_around)
        setattr(torch_checkpoint, REENTRANT, _Plain)
        yield
    finally:
        for name, value in before.items():
            setattr(torch_checkpoint, name, value)
        for module, name, value in options:
            module.__dict__[name] = value
