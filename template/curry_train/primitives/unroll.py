"""Recompute a model's loop over time from outside, where the loop is a method `unroll`.

    recompute_timesteps(model)

The method is called as `self.unroll(step, inputs, state, time_dim=..., outputs=...)`, and does what
`run_timesteps` does. For a loop that is written out in a forward see `checkpoint_timesteps`.

Proof: `python -m pytest tests/primitives/test_snn_timesteps_contract.py`.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..core.blocks import Derived, become, restore
from .snn_timesteps import check_size, checkpoint_timesteps


class Unrolled(Derived):
    """A module whose loop over time is recomputed in chunks of the size that it holds."""

    @property
    def unroll(self) -> Callable[..., tuple[Any, Any]]:
        """Return the loop; a property, so that it goes before one on the instance."""
        return partial(checkpoint_timesteps, chunk_size=self._technique)


def recompute_timesteps(model: nn.Module, *, chunk_size: int | None = None) -> list[str]:
    """Make a model's loops over time recompute, in place, and return the modules' names.

    A module has such a loop if it calls
    `self.unroll(step, inputs, state, time_dim=..., outputs=...)`, with
    `unroll = staticmethod(run_timesteps)` or a similar method. Call this before DDP,
    `fully_shard` and `torch.compile`.
    """
    check_size(chunk_size)
    found = steppers(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no method unroll(step, inputs, state), so its loop over "
            "time can't be replaced from outside; replace the loop in its forward by one line: "
            "outputs, state = checkpoint_timesteps(self.step, inputs, state, time_dim=0, "
            'outputs="stack")'
        )
    for module in found.values():
        become(Unrolled, module, chunk_size)
    return list(found)


def remove_timesteps(model: nn.Module) -> list[str]:
    """Undo `recompute_timesteps` and return the names of the modules that were recomputing."""
    return restore(model, Unrolled)


def steppers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules that have a method `unroll(step, inputs, state, ...)`.

    The keys are qualified names.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in found)
        unroll = getattr(module, "unroll", None)
        if inside or not callable(unroll):
            continue
        if list(inspect.signature(unroll).parameters)[:3] == ["step", "inputs", "state"]:
            found[name] = module
    return found
