"""The cache of keys and values that a Hugging Face model fills in training too, where nothing reads it.

A block that is run again in backward would add to it a second time. So it is left out: of models that are built to be
measured, of calls, and of blocks that recompute. One that somebody reads is refused, as far as that shows. Proof:
`python -m pytest tests/test_key_cache.py`.
"""

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from .derive import class_as_written

logger = logging.getLogger(__name__)
_left_out: WeakKeyDictionary[Any, WeakSet[nn.Module]] = WeakKeyDictionary()
_said: list[bool] = []


def without_cache(module: nn.Module) -> nn.Module:
    """The same module, which fills none from now on."""
    for part in module.modules():
        if _caches(part):
            config: Any = part.config
            config.use_cache = False
    return module


def no_cache_please(module: nn.Module) -> dict[str, bool]:
    """The keyword by which a model fills none in one call."""
    if not _caches(module):
        return {}
    written: Any = class_as_written(module)
    return (
        {"use_cache": False} if "use_cache" in inspect.signature(written.forward).parameters else {}
    )


def leave_out_caches(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block that is run again is called with: without a cache that is empty as far as it is this block's."""
    known = sys.modules.get("transformers.cache_utils")
    caches = (
        []
        if known is None
        else [value for value in (*args, *kwargs.values()) if isinstance(value, known.Cache)]
    )
    if not caches or getattr(
        block, "_can_checkpoint_with_cache", False
    ):  # it reads what another block has put there
        return args, kwargs
    if any(type(layer).__name__ == "DummyLayer" for cache in caches for layer in _layers(cache)):
        return args, kwargs  # blocks that share keys find them there
    for cache in caches:
        _require_unread(block, cache)
        _left_out.setdefault(cache, WeakSet()).add(block)
    _say_once()
    kept = tuple(None if any(value is cache for cache in caches) else value for value in args)
    return kept, {
        name: None if any(value is cache for cache in caches) else value
        for name, value in kwargs.items()
    }


def _caches(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    theirs = any(kind.__module__.startswith("transformers.") for kind in type(config).__mro__)
    return theirs and getattr(config, "use_cache", None) is True


def _layers(cache: Any, index: int | None = None) -> Iterator[Any]:
    """Those of a decoder's own attention and of that to an encoder; of one block, if `index` is given."""
    for part in (
        cache,
        getattr(cache, "self_attention_cache", None),
        getattr(cache, "cross_attention_cache", None),
    ):
        layers = getattr(part, "layers", None) or []
        yield from layers if index is None else layers[index : index + 1]


def _require_unread(block: nn.Module, cache: Any) -> None:
    indices = (getattr(part, "layer_idx", None) for part in block.modules())
    own = next((index for index in indices if isinstance(index, int)), 0)
    again = block in _left_out.get(cache, ())
    if again or any(map(_is_filled, _layers(cache, own))):
        why = "it has been given before" if again else "holds keys already"
        raise ValueError(
            f"{type(block).__name__} gets a cache that {why}, and a block that is run again in backward can't add to "
            "one: train without past_key_values, or leave this block out with blocks="
        )


def _is_filled(layer: Any) -> bool:
    state = getattr(layer, "has_previous_state", False)
    states = state.values() if isinstance(state, Mapping) else [state]
    return bool(getattr(layer, "is_initialized", getattr(layer, "keys", None) is not None)) or any(
        states
    )


def _say_once() -> None:
    if not _said:
        _said.append(True)
        logger.warning(
            "the model fills a cache of keys and values in training, and blocks that recompute leave it out: call the "
            "model with use_cache=False, or set model.config.use_cache = False"
        )
