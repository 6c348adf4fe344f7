"""Recompute a block's activations in backward instead of keeping them.

    model.layers[3] = Recompute(model.layers[3])    # one block
    recompute_blocks(model)                         # every block that the model repeats, in place

A recomputing block is the same module under a subclass: its parameter names, state dict, hooks,
attributes, copies and pickles are those of the original block.

Proof: `python -m pytest tests/test_recompute.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.blocks import find_blocks
from ..core.checkpointed import Options, run_checkpointed
from ..core.derive import Derived, become, derive, restore

OPTIONS = "_recompute"


class Recompute(Derived):
    """A block that trains the same and keeps only its inputs for backward.

    Nothing is recomputed in eval mode, without grad mode, or while `enabled` is False. The other
    keywords are `use_reentrant`, `preserve_rng_state` and `determinism_check` of
    `torch.utils.checkpoint.checkpoint`. BatchNorm statistics are updated once.
    """

    def __new__(cls, module: nn.Module, enabled: bool = True, **options: Any) -> Any:
        return derive(cls, module, **{OPTIONS: Options(enabled=enabled, **options)})

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: the module passed to `__new__` is initialised already."""

    @property
    def recomputes(self) -> bool:
        """Whether backward would recompute a forward that runs now."""
        return bool(self.__dict__[OPTIONS].enabled and self.training and torch.is_grad_enabled())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputes:
            return super().forward(*args, **kwargs)
        return run_checkpointed(
            super().forward, args, kwargs, modules=[self], options=self.__dict__[OPTIONS]
        )


class CheckpointWrapper(Recompute):
    """`Recompute` with the name and the arguments of torch's own wrapper."""

    def __new__(
        cls, module: nn.Module, use_reentrant: bool = False, preserve_rng_state: bool = True
    ) -> Any:
        options = Options(use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
        return derive(cls, module, **{OPTIONS: options})


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
        become(Recompute, block, **{OPTIONS: Options(**options)})
    return list(found)


def remove_recompute(model: nn.Module) -> list[str]:
    """Undo `recompute_blocks` and return the names of the modules that were recomputing."""
    names = [name for name, module in model.named_modules() if isinstance(module, Recompute)]
    for name in names:
        restore(model.get_submodule(name), OPTIONS)
    return names
