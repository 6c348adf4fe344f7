"""Recompute blocks or a module in the backward.

    model.layers[3] = Recompute(model.layers[3])    # one block
    recompute_blocks(model)                         # every block that the model repeats, in place

A recomputing block is the same module under a subclass: its parameter names, state dict, hooks,
attributes, copies and pickles are those of the original block.

Proof: `python -m pytest tests/gates/test_gates.py tests/primitives/test_recompute_contract.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..core.blocks import Derived, become, derive, find_blocks, restore
from ..core.rerun import is_active
from ..core.rerun import plain_blocks as plain_blocks
from .block_state import modules_of
from .checkpointed import RecomputeOptions, run_checkpointed

# Recompute a block's activations in backward instead of keeping them.

RECOMPUTE_ATTRIBUTE = "_recompute"


class Recompute(Derived):
    """A block, or a plain function, that keeps only its inputs for backward.

    It trains the same. Nothing is recomputed in eval mode, without grad mode, inside
    `plain_blocks()`, or while `enabled` is False. The other keywords are those of
    `torch.utils.checkpoint.checkpoint`: `use_reentrant`, `preserve_rng_state`,
    `determinism_check`, `context_fn`, `debug` and `early_stop`. BatchNorm statistics are updated
    once. The given module stays as it was and shares all its state with the block.
    """

    def __new__(
        cls, module: nn.Module | Callable[..., Any], enabled: bool = True, **options: Any
    ) -> Any:
        settings = RecomputeOptions(enabled=enabled, **options)
        if not isinstance(module, nn.Module) and callable(module):
            return _recomputing_function(module, settings)
        return derive(cls, module, **{RECOMPUTE_ATTRIBUTE: settings})

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: the module passed to `__new__` is initialised already."""

    @property
    def recomputes(self) -> bool:
        """Return whether backward would recompute a forward that runs now."""
        return bool(getattr(self, RECOMPUTE_ATTRIBUTE).enabled and is_active(self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputes:
            return super().forward(*args, **kwargs)
        return run_checkpointed(
            super().forward,
            args,
            kwargs,
            modules=[self],
            options=getattr(self, RECOMPUTE_ATTRIBUTE),
        )


def _recomputing_function(function: Callable[..., Any], options: RecomputeOptions) -> Any:
    """Return the function, so that it recomputes whenever grad mode is on, as in torch."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (options.enabled and is_active()):
            return function(*args, **kwargs)
        modules: list[nn.Module] = []
        if not torch.compiler.is_compiling():
            given = (*args, *kwargs.values())
            modules = [value for value in given if isinstance(value, nn.Module)]
            modules += modules_of(function)
        return run_checkpointed(function, args, kwargs, modules=modules, options=options)

    return call


class CheckpointWrapper(Recompute):
    """`Recompute` with the name and the arguments of torch's own wrapper."""

    def __new__(
        cls, module: nn.Module, use_reentrant: bool = False, preserve_rng_state: bool = True
    ) -> Any:
        return super().__new__(
            cls, module, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state
        )


def recompute_blocks(
    model: nn.Module, *, blocks: str | Sequence[str] | None = None, **options: Any
) -> list[str]:
    """Make the blocks of a model recompute, in place, and return their names.

    `blocks` is a glob over module names, or several; without it these are the blocks that the model
    repeats. The options are those of `Recompute`. Call this before DDP, `fully_shard` and
    `torch.compile`.
    """
    found = find_blocks(model, blocks)
    for block in found.values():
        become(Recompute, block, **{RECOMPUTE_ATTRIBUTE: RecomputeOptions(**options)})
    return list(found)


def remove_recompute(model: nn.Module) -> list[str]:
    """Undo `recompute_blocks` and return the names of the modules that were recomputing."""
    return restore(model, Recompute, RECOMPUTE_ATTRIBUTE)
