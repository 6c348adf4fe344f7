"""Run a call again in the backward: one checkpointed call that every technique shares.

BatchNorm's running statistics are updated once, and reentrant checkpointing is refused where it
would lose gradients.

Proof: `python -m pytest tests/primitives`.
"""

import contextlib
import functools
import logging
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..core.blocks import num_recomputed
from ..core.rerun import (
    function_modes,
    function_modes_as,
    is_batch_norm,
    mark_returned_once,
    statistics_kept,
)

# State that a block reads beside its inputs, which a second call in the backward must find again.

# Attributes that torch keeps on every module. Only `training` is part of a call.
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
COPIED_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict}
# A longer container is data, and copying it at each call would cost more than the call.
LONGEST_COPIED = 1000

# The buffers and tensor attributes that each module is known to write in place.
written_names: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class BlockState:
    """Parameters, buffers, attributes, generators and mode of modules at their first call.

    Call `begin` before and `end` after it; inside `with state:` the modules have that state again,
    and what a second call writes is dropped: statistics, counters and histories advance once.
    Objects that were replaced since are put back (`functional_call`, swapped weights). A tensor
    that was changed in place can't be: an error, as in autograd. Batch norms are left to
    `statistics_kept`. Long loops and few calls, because every call of a block runs this.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.roots = roots
        self.states: dict[int, SimpleNamespace] = {}
        # The block's own generators, and those it was called with, with their states.
        self.generators: list[tuple[Generator, Tensor]] = []
        self.outside: list[Any] = []

    def begin(self, arguments: Iterable[Any] = ()) -> None:
        """Record the state before the first call."""
        self.states = {}
        self.generators = [(one, one.get_state()) for one in arguments if type(one) is Generator]
        modules: list[Any] = list(self.roots)
        while modules:
            module = modules.pop()
            if module is None or id(module) in self.states:
                continue
            modules += module._modules.values()
            self.states[id(module)] = state = SimpleNamespace(
                module=module,
                parameters=module._parameters.copy(),
                buffers={} if is_batch_norm(module) else module._buffers.copy(),
                attributes=module.__dict__.copy(),
                versions={},
                containers={},
                # Tensors that the call writes in place, as they were before it.
                clones={},
            )
            may_be_written = state.buffers.copy()
            for name in state.attributes.keys() - TORCH_ATTRIBUTES:
                value = state.attributes[name]
                if isinstance(value, Tensor):
                    may_be_written[name] = value
                elif type(value) is Generator:
                    self.generators.append((value, value.get_state()))
                elif type(value) in COPIED_CONTAINERS and len(value) <= LONGEST_COPIED:
                    state.containers[name] = value.copy()
            # What a module writes is not known before its first call.
            written = written_names.get(module, may_be_written)
            for name, value in (*state.parameters.items(), *may_be_written.items()):
                is_lazy = type(value) in (UninitializedParameter, UninitializedBuffer)
                if value is None or is_lazy or value.is_inference():
                    continue
                state.versions[name] = value, value._version
                if name in written and name in may_be_written:
                    state.clones[name] = value.detach().clone()

    def end(self) -> None:
        """Note after the first call what it wrote in place."""
        for state in self.states.values():
            written = written_names.setdefault(state.module, set())
            for name, (tensor, version) in list(state.versions.items()):
                if tensor._version != version:
                    written.add(name)
                if name in written and name in state.clones:
                    del state.versions[name]
                else:
                    state.clones.pop(name, None)
                    state.versions[name] = tensor, tensor._version

    def __enter__(self) -> None:
        for state in self.states.values():
            for name, (tensor, version) in state.versions.items():
                if tensor._version != version and not _is_released(tensor):
                    raise self._changed(state.module, name)
        outside: list[tuple[dict[str, Any], ...]] = []
        for state in self.states.values():
            module = state.module
            parameters = module._parameters
            buffers = module._buffers
            attributes = module.__dict__
            outside.append((parameters.copy(), buffers.copy(), attributes.copy()))
            if [*map(id, parameters.values())] != [*map(id, state.parameters.values())]:
                _put_back(parameters, state.parameters)
            buffers.update(state.buffers)
            _set_attributes(module, state.attributes)
            for name, value in state.containers.items():
                attributes[name] = value.copy()
            for name, value in state.clones.items():
                (buffers if name in state.buffers else attributes)[name] = value.clone()
        generators = [(one, one.get_state()) for one, _ in self.generators]
        self.outside.append((outside, generators))
        for generator, drawn in self.generators:
            generator.set_state(drawn)
        num_recomputed[0] += 1

    def __exit__(self, *_: object) -> None:
        num_recomputed[0] -= 1
        outside, generators = self.outside.pop()
        for generator, drawn in generators:
            generator.set_state(drawn)
        for state, before in zip(self.states.values(), outside, strict=False):
            if [*map(id, state.module._parameters.values())] != [*map(id, before[0].values())]:
                _put_back(state.module._parameters, before[0])
            state.module._buffers.update(before[1])
            _set_attributes(state.module, before[2])

    def _changed(self, module: nn.Module, name: str) -> RuntimeError:
        for root in self.roots:
            for path, other in root.named_modules():
                if other is module:
                    name = f"{path}.{name}".lstrip(".") + f" of {type(root).__name__}"
        return RuntimeError(
            f"{name} was changed in place between the forward and its backward, so the block can't "
            "be recomputed as it ran: run backward before the change, or assign a new tensor"
        )


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = module.__dict__
    for name in own.keys() - attributes.keys() - TORCH_ATTRIBUTES:
        del own[name]
    for name, value in attributes.items():
        if name not in TORCH_ATTRIBUTES and own.get(name) is not value:
            own[name] = value


def _is_released(tensor: Any) -> bool:
    """Return whether the memory of a tensor was freed, as sharded training does between calls."""
    has_storage = tensor is not None and tensor.layout == torch.strided and tensor.numel() > 0
    return has_storage and tensor.untyped_storage().nbytes() == 0


def _put_back(parameters: dict[str, Any], values: dict[str, Any]) -> None:
    """Put back replaced parameters, but not a shard or a whole one that `fully_shard` exchanges."""
    for name, value in values.items():
        present = parameters.get(name)
        is_exchanged = hasattr(value, "placements") != hasattr(present, "placements")
        if present is not value and not is_exchanged and not _is_released(value):
            parameters[name] = value


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
        return [*tensors, *_in_dataclasses(self.leaves, set())]

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


def _in_dataclasses(leaves: Iterable[Any], seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in dataclasses, which pytree opens only if their class is registered."""
    for leaf in leaves:
        if not is_dataclass(leaf) or isinstance(leaf, type) or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        values = tree_leaves([getattr(leaf, field.name, None) for field in fields(leaf)])
        for value in values:
            if isinstance(value, Tensor) and not value.is_inference():
                yield value
        yield from _in_dataclasses(values, seen)


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
    given = (*args, *kwargs.values())
    caches = {id(value): value for value in given if isinstance(value, cache_utils.Cache)}

    # Such a block reads what another block has put into the cache.
    if not caches or getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs

    # Blocks that share keys find them in such a layer.
    layers = (layer for cache in caches.values() for layer in _layers(cache))
    if any(type(layer).__name__ == "DummyLayer" for layer in layers):
        return args, kwargs

    for cache in caches.values():
        _require_unread(block, cache)
        _left_out.setdefault(cache, WeakSet()).add(block)
    _warn_once()

    return (
        tuple(None if id(value) in caches else value for value in args),
        {name: None if id(value) in caches else value for name, value in kwargs.items()},
    )


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
