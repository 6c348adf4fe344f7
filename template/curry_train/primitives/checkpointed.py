"""Run a call again in the backward: one checkpointed call that every technique shares.

BatchNorm's running statistics are updated once, and reentrant checkpointing is refused where it
would lose gradients.

Proof: `python -m pytest tests/primitives`.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..core.blocks import tensors_in
from ..core.rerun import function_modes, function_modes_as, mark_returned_once, statistics_kept
from .block_state import BlockState

# Calls flattened to functions of their tensors, for `torch.utils.checkpoint`.

Pair = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
NO_CONTEXTS: Pair = contextlib.nullcontext(), contextlib.nullcontext()
# Placeholder for a tensor that was taken out.
TENSOR_PLACEHOLDER = object()
NO_CONTAINERS = {Tensor, Parameter, type(None), bool, int, float, str}


class FlatCall:
    """`run(*args, **kwargs)` as a function of `*self.take_tensors()` that can be called again.

    The first call gets the caller's own containers, and later calls get new ones with the original
    contents. So a block that appends to a list appends once, and one that pops from a dictionary
    finds the value again.
    """

    def __init__(
        self,
        state: BlockState,
        run: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        contexts: Callable[[], Pair] | None = None,
    ) -> None:
        self.run = run
        self.state = state
        # Not given to torch: it takes no contexts together with `debug`.
        self.first, self.second = contexts() if contexts else NO_CONTEXTS
        self.function_modes = function_modes()
        self.names = tuple(kwargs)
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.leaves: list[Any] = [*args, *kwargs.values()]
        self.shape: TreeSpec | None = None
        if not NO_CONTAINERS.issuperset(map(type, self.leaves)):
            self.leaves, self.shape = tree_flatten(self.leaves)

    def take_tensors(self) -> list[Tensor]:
        """Return all tensors and release those that are not in dataclasses.

        The tensors of dataclasses come last. They stay in their dataclass, and are returned so that
        changes in place are detected.
        """
        tensors = []
        for index, leaf in enumerate(self.leaves):
            # Inference tensors have no version counter, and can't be saved for backward.
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                tensors.append(leaf)
                self.leaves[index] = TENSOR_PLACEHOLDER
        if self.shape is None:
            return tensors
        return [*tensors, *(one for one in tensors_in(self.leaves) if not one.is_inference())]

    def __call__(self, *tensors: Tensor) -> Any:
        if self.inputs is not None:
            args, kwargs = self.inputs
            self.inputs = None
            self.state.begin(self.leaves)
            with self.first:
                output = self.run(*args, **kwargs)
            self.state.end()
            return output

        remaining = iter(tensors)
        values = [next(remaining) if leaf is TENSOR_PLACEHOLDER else leaf for leaf in self.leaves]
        if self.shape is not None:
            values = tree_unflatten(values, self.shape)
        num_args = len(values) - len(self.names)
        kwargs = dict(zip(self.names, values[num_args:], strict=True))
        with (
            self.state,
            statistics_kept(self.state.roots),
            function_modes_as(self.function_modes),
            self.second,
        ):
            return self.run(*values[:num_args], **kwargs)


# Activation checkpointing of one call, on top of `torch.utils.checkpoint`.

DETERMINISM_CHECKS = ("default", "none")


@dataclass(frozen=True)
class RecomputeOptions:
    """Settings of recompute for one module, stored on the module and copied with it."""

    # Recompute in training; if False, the module runs as without recompute.
    enabled: bool = True
    # Passed to `torch.utils.checkpoint`, as are the others that follow.
    use_reentrant: bool = False
    # Restore torch's generators for the recomputed forward, so that dropout draws the same mask.
    preserve_rng_state: bool = True
    # "default" compares shapes, dtypes and devices of saved tensors with the recomputed ones.
    determinism_check: str = "default"
    # Returns the contexts of the first and of the recomputed forward.
    context_fn: Callable[[], Pair] | None = None
    # Errors about a recomputed forward that differs list the operations of both.
    debug: bool = False
    # End the recomputed forward at the last tensor that backward needs.
    early_stop: bool = True

    def __post_init__(self) -> None:
        for name in ("enabled", "use_reentrant", "preserve_rng_state", "debug", "early_stop"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.determinism_check not in DETERMINISM_CHECKS:
            raise ValueError(
                f"determinism_check must be one of {DETERMINISM_CHECKS}, "
                f"got {self.determinism_check!r}"
            )
        if self.use_reentrant and (self.debug or self.context_fn is not None):
            raise ValueError(
                "reentrant checkpointing takes no context_fn and no debug: leave use_reentrant at "
                "False"
            )


def run_checkpointed(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    modules: Sequence[nn.Module],
    options: RecomputeOptions,
    contexts: Callable[[], Pair] | None = None,
) -> Any:
    """Call `run(*args, **kwargs)`, saving only its inputs; `modules` are those that `run` calls.

    `contexts` returns the contexts of the first and the recomputed forward, like the `context_fn`
    of `torch.utils.checkpoint`.
    """
    if options.use_reentrant and not _gradients_flow(run, modules, args, kwargs):
        # No gradient is needed, so nothing would be saved for backward.
        return run(*args, **kwargs)

    contexts = contexts or options.context_fn
    names = ["use_reentrant", "preserve_rng_state"]
    if not options.use_reentrant:
        names += ["determinism_check", "debug", "early_stop"]
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    if torch.compiler.is_compiling():
        # Compiled code saves every tensor, and notices changes in place. Keywords are bound here,
        # because `checkpoint` has some of its own, such as `debug`.
        if kwargs:
            run = functools.partial(run, **kwargs)
        if contexts is not None:
            settings["context_fn"] = contexts
        return checkpoint(run, *args, **settings)

    if modules:
        args, kwargs = leave_out_caches(modules[0], args, kwargs)
    call = FlatCall(BlockState(modules), run, args, kwargs, contexts)
    output = checkpoint(call, *call.take_tensors(), **settings)
    if not options.use_reentrant:
        mark_returned_once(output)
    return output


def _gradients_flow(
    run: Any, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether an input requires grad; refuse reentrant calls that would lose gradients.

    Reentrant checkpointing runs backward only through positional tensors.
    """
    called = type(modules[0]).__name__ if modules else getattr(run, "__name__", str(run))
    nested = tree_leaves(([value for value in args if not isinstance(value, Tensor)], kwargs))
    if any(isinstance(value, Tensor) and value.requires_grad for value in nested):
        raise ValueError(
            f"{called} gets a tensor that requires grad by keyword or inside a "
            "container, and with use_reentrant=True its gradient would be lost; leave "
            "use_reentrant at False"
        )
    requires_grad = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    if not requires_grad and any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"no input of {called} requires grad, and with use_reentrant=True its "
            "parameters would get no gradient at all; leave use_reentrant at False, or call "
            "enable_input_require_grads() or a similar method"
        )
    return requires_grad


# Caches of keys and values of Hugging Face models: a block that runs again would add twice.

logger = logging.getLogger(__name__)
_left_out: WeakKeyDictionary[Any, WeakSet[nn.Module]] = WeakKeyDictionary()


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
    layers = (layer for cache in caches for layer in _layers(cache))
    if any(type(layer).__name__ == "DummyLayer" for layer in layers):
        return args, kwargs

    for cache in caches:
        _require_unread(block, cache)
    for cache in caches:
        _left_out.setdefault(cache, WeakSet()).add(block)
    _warn_once()

    def without(value: Any) -> Any:
        return None if any(value is cache for cache in caches) else value

    return tuple(map(without, args)), {name: without(value) for name, value in kwargs.items()}


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


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "the model fills a cache of keys and values in training, and blocks that recompute leave "
        "it out: call the model with use_cache=False, or set model.config.use_cache = False"
    )
