"""Recompute blocks or a module in the backward.

    model.layers[3] = Recompute(model.layers[3])    # one block
    recompute_blocks(model)                         # every block that the model repeats, in place

A recomputing block is the same module under a subclass: its parameter names, state dict, hooks,
attributes, copies and pickles are those of the original block. BatchNorm's running statistics are
updated once, and reentrant checkpointing is refused where it would lose gradients.

Proof: `python -m pytest tests/primitives/test_recompute_options.py tests/core/test_key_cache.py`.
"""

import functools
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..core.blocks import (
    DerivedForward,
    Globs,
    become,
    find_blocks,
    is_active,
    recomputing,
    refuse,
    restore,
    tensors_in,
)
from ..core.blocks import plain_blocks as plain_blocks
from .rerun import FlatCall, Inputs, Pair, mark_returned_once, modules_of, second_call_contexts


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
    context_fn: Callable[[], Pair] = noop_context_fn
    # Errors about a recomputed forward that differs list the operations of both.
    debug: bool = False
    # End the recomputed forward at the last tensor that backward needs.
    early_stop: bool = True
    # Replaces the contexts in a call that is not compiled, as `keep_routing` does.
    change_contexts: Callable[[Pair], Pair] | None = None

    def __post_init__(self) -> None:
        for name in ("enabled", "use_reentrant", "preserve_rng_state", "debug", "early_stop"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.determinism_check not in ("default", "none"):
            raise ValueError(f"determinism_check: default or none, not {self.determinism_check!r}")
        has_contexts = self.context_fn is not noop_context_fn or self.change_contexts is not None
        if self.use_reentrant and (self.debug or has_contexts):
            raise ValueError(
                "reentrant checkpointing takes no context_fn and no debug: turn use_reentrant off"
            )


# Recompute a block's activations in backward instead of keeping them.

second_call_contexts.add(recomputing)


class Checkpointed(DerivedForward):
    """A block that runs under a checkpoint, with the options that it holds."""

    _compiles = True

    def _run_changed(self, run: Any, inputs: Any) -> Any:
        return run_checkpointed(run, inputs, modules=[self], options=self._technique)


class Recompute(Checkpointed):
    """A block, or a plain function, that keeps only its inputs for backward.

    It trains the same. Nothing is recomputed in eval mode, without grad mode, inside
    `plain_blocks()`, or while `enabled` is False. The other keywords are those of
    `torch.utils.checkpoint.checkpoint`: `use_reentrant`, `preserve_rng_state`,
    `determinism_check`, `context_fn`, `debug` and `early_stop`. The given module stays as it was
    and shares all its state with the block.
    """

    def __new__(
        cls, module: nn.Module | Callable[..., Any], enabled: bool = True, **options: Any
    ) -> Any:
        settings = RecomputeOptions(enabled=enabled, **options)
        if not isinstance(module, nn.Module) and callable(module):
            # A function recomputes whenever grad mode is on, as in torch.
            @functools.wraps(module)
            def call(*args: Any, **kwargs: Any) -> Any:
                if not (enabled and is_active()):
                    return module(*args, **kwargs)
                used = []
                if not torch.compiler.is_compiling():
                    used = modules_of(functools.partial(module, *args, **kwargs))
                return run_checkpointed(module, (args, kwargs), modules=used, options=settings)

            return call
        refuse(module)
        # Both share one state: what `eval()` or an assignment changes in one is changed in both.
        block: Any = object.__new__(type(module))
        object.__setattr__(block, "__dict__", module.__dict__)
        become(cls, block, settings)
        return block

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: the module passed to `__new__` is initialised already."""


class CheckpointWrapper(Recompute):
    """`Recompute` with the name and the arguments of torch's own wrapper."""

    def __new__(
        cls, module: nn.Module, use_reentrant: bool = False, preserve_rng_state: bool = True
    ) -> Any:
        return super().__new__(
            cls, module, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state
        )


def recompute_blocks(model: nn.Module, *, blocks: Globs | None = None, **options: Any) -> list[str]:
    """Make the blocks of a model recompute, in place, and return their names.

    `blocks` is a glob over module names, or several; without it these are the blocks that the model
    repeats. The options are those of `Recompute`. Call this before DDP, `fully_shard` and
    `torch.compile`.
    """
    found = find_blocks(model, blocks)
    for block in found.values():
        become(Recompute, block, RecomputeOptions(**options))
    return list(found)


def remove_recompute(model: nn.Module) -> list[str]:
    """Undo `recompute_blocks` and return the names of the modules that were recomputing."""
    return restore(model, Recompute)


# One checkpointed call, on top of torch's.


def run_checkpointed(
    run: Callable[..., Any],
    inputs: Inputs,
    *,
    modules: Sequence[nn.Module],
    options: RecomputeOptions,
) -> Any:
    """Call `run(*args, **kwargs)`, saving only its inputs; `modules` are those that `run` calls."""
    args, kwargs = inputs
    if not options.enabled or (
        options.use_reentrant and not _check_gradients(run, modules, inputs)
    ):
        return run(*args, **kwargs)

    names = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    if torch.compiler.is_compiling():
        # Compiled code saves every tensor, and notices changes in place. Keywords are bound here,
        # because `checkpoint` has some of its own, such as `debug`.
        if kwargs:
            run = functools.partial(run, **kwargs)
        if options.context_fn is not noop_context_fn:
            settings["context_fn"] = options.context_fn
        return checkpoint(run, *args, **settings)

    if modules:
        inputs = leave_out_caches(modules[0], inputs)
    contexts = options.context_fn()
    if options.change_contexts is not None:
        contexts = options.change_contexts(contexts)
    call = FlatCall(run, inputs, modules=modules, contexts=contexts)
    tensors = call.take_tensors()
    # Torch also gets the tensors of dataclasses, so that it detects changes of them in place.
    tensors += [one for one in tensors_in(call.leaves) if not one.is_inference()]
    try:
        output = checkpoint(call, *tensors, **settings)
    except BaseException as error:
        _end_hooks(error)
        raise
    mark_returned_once(output)
    found = [*tensors_in(output)]
    has_gradients = all(one.requires_grad for one in found if one.is_floating_point())
    # Without a tensor, the output is in a container that the block was given.
    if options.use_reentrant and not (found and has_gradients):
        raise ValueError(
            f"{type(modules[0]).__name__ if modules else run} returns a tensor inside a container, "
            "and with use_reentrant=True its gradient would be lost; leave use_reentrant at False"
        )
    return output


def _end_hooks(error: BaseException) -> None:
    """Take down a checkpoint's hooks, which torch 2.11 keeps as long as the error's frames live.

    In a function of its own, because a variable for a frame in one of these frames would be a
    cycle, which holds their tensors until the collector runs.
    """
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if frame.f_code is inspect.unwrap(checkpoint).__code__ and "gen" in frame.f_locals:
            frame.f_locals["gen"].close()


def _check_gradients(run: Any, modules: Sequence[nn.Module], inputs: Inputs) -> bool:
    """Return whether an input requires grad; refuse reentrant calls that would lose gradients.

    Reentrant checkpointing runs backward only through positional tensors.
    """
    args, kwargs = inputs
    called = type(modules[0]).__name__ if modules else getattr(run, "__name__", str(run))
    nested = [value for value in args if not isinstance(value, Tensor)]
    if any(tensor.requires_grad for tensor in tensors_in((nested, kwargs))):
        raise ValueError(
            f"{called} gets a tensor that requires grad by keyword or inside a container, and with "
            "use_reentrant=True its gradient would be lost; leave use_reentrant at False"
        )
    requires_grad = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    trained = any(one.requires_grad for module in modules for one in module.parameters())
    if trained and not requires_grad:
        raise ValueError(
            f"no input of {called} requires grad, and with use_reentrant=True its "
            "parameters would get no gradient at all; leave use_reentrant at False, or call "
            "enable_input_require_grads() or a similar method"
        )
    return requires_grad


# Caches of keys and values of Hugging Face models: a block that runs again would add twice.

logger = logging.getLogger(__name__)
_left_out: WeakKeyDictionary[Any, WeakSet[nn.Module]] = WeakKeyDictionary()


def leave_out_caches(block: nn.Module, inputs: Inputs) -> Inputs:
    """Return the arguments of a block that recomputes, with None in place of each cache.

    A cache in which this block's own layer is filled already is refused.
    """
    cache_utils = sys.modules.get("transformers.cache_utils")
    # A block of this kind reads what another block has put into the cache.
    if cache_utils is None or getattr(block, "_can_checkpoint_with_cache", False):
        return inputs
    args, kwargs = inputs
    given = (*args, *kwargs.values())
    caches = {value for value in given if isinstance(value, cache_utils.Cache)}
    # Blocks that share keys find them in such a layer.
    layers = [layer for cache in caches for stack in _list_stacks(cache) for layer in stack]
    if not caches or any(type(layer).__name__ == "DummyLayer" for layer in layers):
        return inputs

    indices = (getattr(submodule, "layer_idx", None) for submodule in block.modules())
    own_index = next((index for index in indices if isinstance(index, int)), 0)
    for cache in caches:
        left_out = _left_out.setdefault(cache, WeakSet())
        own = [layer for stack in _list_stacks(cache) for layer in stack[own_index : own_index + 1]]
        if block in left_out or any(map(_is_filled, own)):
            raise ValueError(
                f"{type(block).__name__} gets a cache that it has been given before or that holds "
                "keys already, and a block that is recomputed in backward can't add to a cache: "
                "train without past_key_values, or leave this block out with blocks="
            )
        left_out.add(block)
    _warn_once()
    left = [None if isinstance(value, cache_utils.Cache) else value for value in given]
    return tuple(left[: len(args)]), dict(zip(kwargs, left[len(args) :], strict=True))


def _list_stacks(cache: Any) -> list[list[Any]]:
    """Return the layers of a cache, for self-attention and for cross-attention."""
    names = ("self_attention_cache", "cross_attention_cache")
    halves = [cache, *(getattr(cache, name, None) for name in names)]
    return [getattr(half, "layers", None) or [] for half in halves]


def _is_filled(layer: Any) -> bool:
    state = getattr(layer, "has_previous_state", None)
    states = state.values() if isinstance(state, Mapping) else [state]
    return getattr(layer, "keys", None) is not None or any(states)


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "the model fills a cache of keys and values in training, and blocks that recompute leave "
        "it out: call the model with use_cache=False, or set model.config.use_cache = False"
    )
