"""The cache of keys and values that a Hugging Face model fills in training too, where nothing reads it.

A block that is run again in backward would add to it a second time, and what it holds leaves no device. So it is left
out: of models that are built to be measured, of calls, and of blocks that recompute or offload. Proof:
`python -m pytest tests/test_key_cache.py`.
"""

import inspect
import logging
import sys
from typing import Any

from torch import nn

from .derive import class_as_written

logger = logging.getLogger(__name__)
_said: list[bool] = []


def without_cache(module: nn.Module) -> nn.Module:
    """The same module, which fills none from now on."""
    for part in module.modules():
        if _caches(part):
            part.config.use_cache = False  # type: ignore[union-attr]
    return module


def no_cache_please(module: nn.Module) -> dict[str, bool]:
    """The keyword by which a model fills none in one call."""
    if not _caches(module):
        return {}
    written: Any = class_as_written(module)
    return {"use_cache": False} if "use_cache" in inspect.signature(written.forward).parameters else {}


def leave_out_caches(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block is called with, without a cache that is empty. One that is not can't be left out, and is refused."""
    known = sys.modules.get("transformers.cache_utils")
    if known is None or not any(isinstance(value, known.Cache) for value in (*args, *kwargs.values())):
        return args, kwargs
    if getattr(block, "_can_checkpoint_with_cache", False):  # it reads what another block has put there
        return args, kwargs

    def left_out(value: Any) -> Any:
        if not isinstance(value, known.Cache):
            return value
        _require_empty(block, value)
        return None

    _say_once()
    return tuple(map(left_out, args)), {name: left_out(value) for name, value in kwargs.items()}


def _caches(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "use_cache", None) is True


def _require_empty(block: nn.Module, cache: Any) -> None:
    """As far as it is this block's."""
    indices = (getattr(part, "layer_idx", None) for part in block.modules())
    own = next((index for index in indices if isinstance(index, int)), 0)
    if length := int(cache.get_seq_length(own)):
        raise ValueError(
            f"{type(block).__name__} gets a cache with keys of {length} positions, and would add its own a second time "
            "when it is run again: train without past_key_values, or leave this block out with blocks="
        )


def _say_once() -> None:
    if not _said:
        _said.append(True)
        logger.warning(
            "the model fills a cache of keys and values in training, where nothing reads it, and blocks that recompute "
            "or offload leave it out: call the model with use_cache=False, or set model.config.use_cache = False"
        )
