"""Leave out the key/value cache that Hugging Face models fill during training.

Nothing reads the cache in training, and a block that is recomputed in backward would add to it a
second time. So models that are built to be measured, calls, and blocks that recompute go without
it. A cache that something does read is refused, as far as that can be detected.

Proof: `python -m pytest tests/core/test_key_cache.py`.
"""

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from .blocks import class_as_written

logger = logging.getLogger(__name__)
_left_out: WeakKeyDictionary[Any, WeakSet[nn.Module]] = WeakKeyDictionary()
_said: list[bool] = []


def without_cache(module: nn.Module) -> nn.Module:
    """Switch the cache off in the configuration of every submodule, and return the module."""
    for submodule in module.modules():
        if _caches(submodule):
            config: Any = submodule.config
            config.use_cache = False
    return module


def no_cache_please(module: nn.Module) -> dict[str, bool]:
    """Return the keyword argument that switches the cache off for one call, if there is one."""
    if not _caches(module):
        return {}
    written: Any = class_as_written(module)
    accepted = inspect.signature(written.forward).parameters
    return {"use_cache": False} if "use_cache" in accepted else {}


def leave_out_caches(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block that recomputes, with None in place of each cache.

    A cache in which this block's own layer is filled already is refused.
    """
    cache_utils = sys.modules.get("transformers.cache_utils")
    if cache_utils is None:
        return args, kwargs
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, cache_utils.Cache)]

    # Such a block reads what another block has put into the cache.
    if not caches or getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs

    # Blocks that share keys find them in such a layer.
    if any(type(layer).__name__ == "DummyLayer" for cache in caches for layer in _layers(cache)):
        return args, kwargs

    for cache in caches:
        _require_unread(block, cache)
        _left_out.setdefault(cache, WeakSet()).add(block)
    _say_once()

    def without(value: Any) -> Any:
        return None if any(value is cache for cache in caches) else value

    return (
        tuple(without(value) for value in args),
        {name: without(value) for name, value in kwargs.items()},
    )


def _caches(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    bases = type(config).__mro__
    is_hugging_face = any(base.__module__.startswith("transformers.") for base in bases)
    return is_hugging_face and getattr(config, "use_cache", None) is True


def _layers(cache: Any, index: int | None = None) -> Iterator[Any]:
    """Yield the layers of a cache, for self-attention and cross-attention.

    With `index`, only those of one block.
    """
    for attention_cache in (
        cache,
        getattr(cache, "self_attention_cache", None),
        getattr(cache, "cross_attention_cache", None),
    ):
        layers = getattr(attention_cache, "layers", None) or []
        yield from layers if index is None else layers[index : index + 1]


def _require_unread(block: nn.Module, cache: Any) -> None:
    indices = (getattr(submodule, "layer_idx", None) for submodule in block.modules())
    own_index = next((index for index in indices if isinstance(index, int)), 0)
    given_before = block in _left_out.get(cache, ())
    if given_before or any(map(_is_filled, _layers(cache, own_index))):
        reason = "it has been given before" if given_before else "holds keys already"
        raise ValueError(
            f"{type(block).__name__} gets a cache that {reason}, and a block that is recomputed in "
            "backward can't add to a cache: train without past_key_values, or leave this block out "
            "with blocks="
        )


def _is_filled(layer: Any) -> bool:
    has_keys = getattr(layer, "keys", None) is not None
    if getattr(layer, "is_initialized", has_keys):
        return True
    state = getattr(layer, "has_previous_state", False)
    return any(state.values() if isinstance(state, Mapping) else [state])


def _say_once() -> None:
    if not _said:
        _said.append(True)
        logger.warning(
            "the model fills a cache of keys and values in training, and blocks that recompute "
            "leave it out: call the model with use_cache=False, or set model.config.use_cache = "
            "False"
        )
