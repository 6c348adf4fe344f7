"""Run a call again in the backward: one checkpointed call that every technique shares.

BatchNorm's running statistics are updated once, and reentrant checkpointing is refused where it
would lose gradients.

Proof: `python -m pytest tests/primitives`.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._device import DeviceContext
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..core.hugging_face import leave_out_caches

# ------------------------------------------------------------------------------
# Calls flattened to functions of their tensors, for `torch.utils.checkpoint`.
# ------------------------------------------------------------------------------

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
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run = run
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
            return self.run(*args, **kwargs)

        remaining = iter(tensors)
        values = [next(remaining) if leaf is TENSOR_PLACEHOLDER else leaf for leaf in self.leaves]
        if self.shape is not None:
            values = tree_unflatten(values, self.shape)
        num_args = len(values) - len(self.names)
        return self.run(*values[:num_args], **dict(zip(self.names, values[num_args:], strict=True)))


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


# ------------------------------------------------------------------------------
# Checkpoint one cheap module, and recompute its output too if backward needs it.
# ------------------------------------------------------------------------------

REPLAY_KEY = "curry_train_replay"

# Set on nodes that lead into a checkpointed call, which returns each saved tensor only once.
RETURNED_ONCE_KEY = "curry_train_again"


class Replay:
    """One call of a module that saves only its input.

    When backward needs a tensor that the call saved, or its output, a second call recomputes all of
    them. The object is kept alive by the tensors that autograd saved from the call and by the users
    of its output, which release it in backward. Nodes must not hold it, because they live as long
    as the loss.
    """

    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run = run
        self.inputs = (args, kwargs)
        self.versions: list[tuple[Tensor, int]] = []
        self.autocast = autocast_now()
        self.modes = function_modes()
        self.num_saved = 0
        self.num_uses = 0
        self.saved: dict[int, Tensor] = {}
        self.output: Tensor | None = None

    def first(self) -> Any:
        """Make the first call, and mark its output so that it can be recomputed."""
        args, kwargs = self.inputs
        tree_map(self._watch, self.inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self.run(*args, **kwargs)
        fresh = isinstance(output, Tensor) and output.grad_fn is not None and output._base is None
        if fresh and not any(output is tensor for tensor, _ in self.versions):
            setattr(output, REPLAY_KEY, self)
            # Recipes for casts of the output look it up here.
            output.grad_fn.metadata[REPLAY_KEY] = weakref.ref(self)
        return output

    def use(self) -> Callable[[], Tensor]:
        """Return a function that gives the output in backward; the last use releases the output."""
        self.num_uses += 1
        return self._take

    def _take(self) -> Tensor:
        if self.output is None:
            self._again()
        output = self.output
        assert output is not None
        self.num_uses -= 1
        if self.num_uses <= 0:
            self.output = None
        return output

    def _watch(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            self.versions.append((leaf, leaf._version))

    def _pack(self, _: Tensor) -> int:
        self.num_saved += 1
        return self.num_saved - 1

    def _unpack(self, index: int) -> Tensor:
        if index not in self.saved:
            self._again()
        return self.saved.pop(index)

    def _again(self) -> None:
        for tensor, version in self.versions:
            check_unchanged(tensor, version)
        saved: list[Tensor] = []

        def capture(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        args, kwargs = tree_map(_cut, self.inputs)
        modes = function_modes_as(self.modes)
        with (
            torch.enable_grad(),
            autocast_as(self.autocast),
            modes,
            saved_tensors_hooks(capture, saved.__getitem__),
        ):
            output = self.run(*args, **kwargs)
        if len(saved) != self.num_saved:
            raise RuntimeError(
                f"a module saved {self.num_saved} tensors the first time and {len(saved)} the "
                "second: it computes something else when it is recomputed; take it out of the "
                "regions"
            )
        self.saved = dict(enumerate(saved))
        self.output = output.detach() if isinstance(output, Tensor) else None


def _cut(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raise if a saved tensor was changed in place, as autograd does for tensors without hooks."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an "
            f"inplace operation: it is at version {tensor._version}, and {version} was saved; "
            "write the result to another tensor"
        )


Autocast = list[tuple[str, torch.dtype]]


def autocast_now() -> Autocast:
    """Return the device types for which autocast is on, with their dtypes."""
    return [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
        if torch.is_autocast_enabled(kind)
    ]


@contextlib.contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Set autocast to a recorded state inside the context."""
    now = autocast_now()
    if now == state:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind, _ in now:
            stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


def function_modes() -> list[TorchFunctionMode]:
    """Return the active function modes, such as `with torch.device(...)`."""
    return list(_get_current_function_mode_stack())


@contextlib.contextmanager
def function_modes_as(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """Enter recorded function modes that are not active now.

    Torch runs backward without the modes in which `backward` is called. For a default device a new
    context is entered, because a context can restore only one previous state.
    """
    now = function_modes()
    with contextlib.ExitStack() as stack:
        for mode in modes:
            if not any(mode is other for other in now):
                stack.enter_context(mode.device if isinstance(mode, DeviceContext) else mode)
        yield


# ------------------------------------------------------------------------------
# Activation checkpointing of one call, on top of `torch.utils.checkpoint`.
# ------------------------------------------------------------------------------

Pair = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
DETERMINISM_CHECKS = ("default", "none")


@dataclass(frozen=True)
class RecomputeOptions:
    """Settings of recompute for one module, stored on the module and copied with it."""

    # Recompute in training; if False, the module runs as without recompute.
    enabled: bool = True
    # Passed to `torch.utils.checkpoint`, as are the following two.
    use_reentrant: bool = False
    # Restore torch's generators for the recomputed forward, so that dropout draws the same mask.
    preserve_rng_state: bool = True
    # "default" compares shapes, dtypes and devices of saved tensors with the recomputed ones.
    determinism_check: str = "default"

    def __post_init__(self) -> None:
        for name in ("enabled", "use_reentrant", "preserve_rng_state"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.determinism_check not in DETERMINISM_CHECKS:
            raise ValueError(
                f"determinism_check must be one of {DETERMINISM_CHECKS}, "
                f"got {self.determinism_check!r}"
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
    if options.use_reentrant and not _gradients_flow(modules[0], args, kwargs):
        # No gradient is needed, so nothing would be saved for backward.
        return run(*args, **kwargs)

    context_option: dict[str, Any] = {}
    if not torch.compiler.is_compiling():
        if modules:
            args, kwargs = leave_out_caches(modules[0], args, kwargs)
        run = FlatCall(run, args, kwargs)
        args = tuple(run.take_tensors())
        context_option["context_fn"] = functools.partial(_contexts, modules, contexts)
    else:
        # Compiled code needs no FlatCall: it saves every tensor, and raises an error if one was
        # changed in place. Keywords are bound here, because `checkpoint` has some of its own, such
        # as `debug`.
        if kwargs:
            run = functools.partial(run, **kwargs)
        if contexts is not None:
            context_option["context_fn"] = contexts

    if options.use_reentrant:
        return checkpoint(
            _once_in_two(run, modules),
            *args,
            use_reentrant=True,
            preserve_rng_state=options.preserve_rng_state,
        )
    output = checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=options.preserve_rng_state,
        determinism_check=options.determinism_check,
        **context_option,
    )
    if not torch.compiler.is_compiling():
        _mark(output)
    return output


def _mark(output: Any) -> None:
    """Mark an output's nodes, so that `Replay` does not recompute it from their saved tensors.

    Those can be unpacked only once.
    """
    for leaf in tree_leaves(output):
        if not isinstance(leaf, Tensor):
            continue
        for tensor in (leaf, leaf._base):
            if tensor is not None and tensor.grad_fn is not None:
                node: Any = tensor.grad_fn
                node.metadata[RETURNED_ONCE_KEY] = True


def _contexts(modules: Sequence[nn.Module], contexts: Callable[[], Pair] | None) -> Pair:
    if contexts is None:
        return contextlib.nullcontext(), _EachRecompute(modules)
    first, second = contexts()
    return first, _EachRecompute(modules, inside=second)


class _EachRecompute(contextlib.AbstractContextManager[None]):
    """Context of recomputed forwards that can be entered several times.

    With `create_graph=True` the same forward is recomputed twice.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        inside: contextlib.AbstractContextManager[Any] | None = None,
    ):
        self.modules = modules
        self.inside = inside
        self.function_modes = function_modes()
        self.entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_statistics_kept(self.modules))
            stack.enter_context(function_modes_as(self.function_modes))
            if self.inside is not None:
                stack.enter_context(self.inside)
            self.entered.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> bool | None:
        return self.entered.pop().__exit__(*raised)


@contextlib.contextmanager
def _statistics_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep BatchNorm's running statistics unchanged during a recomputed forward.

    This sets momentum to 0 and leaves `track_running_stats` on, because autograd has to save as
    many tensors as in the first forward.
    """
    layers = {id(layer): layer for module in modules for layer in module.modules()}.values()
    norms = [
        layer for layer in layers if isinstance(layer, _NormBase) and layer.track_running_stats
    ]
    before = [(layer.momentum, layer._buffers.get("num_batches_tracked")) for layer in norms]
    try:
        for layer, (_, batches) in zip(norms, before, strict=True):
            layer.momentum = 0.0
            layer._buffers["num_batches_tracked"] = None if batches is None else batches.clone()
        yield
    finally:
        for layer, (momentum, batches) in zip(norms, before, strict=True):
            layer.momentum = momentum
            layer._buffers["num_batches_tracked"] = batches


def _once_in_two(run: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Keep running statistics when grad mode is on, as it is in reentrant recomputed forwards."""

    def run_or_recompute(*args: Any) -> Any:
        with _statistics_kept(modules) if torch.is_grad_enabled() else contextlib.nullcontext():
            return run(*args)

    return run_or_recompute


def _gradients_flow(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an input requires grad; refuse reentrant calls that would lose gradients.

    Reentrant checkpointing runs backward only through positional tensors.
    """
    nested = tree_leaves(([value for value in args if not isinstance(value, Tensor)], kwargs))
    if any(isinstance(value, Tensor) and value.requires_grad for value in nested):
        raise ValueError(
            f"{type(module).__name__} gets a tensor that requires grad by keyword or inside a "
            "container, and with use_reentrant=True its gradient would be lost; leave "
            "use_reentrant at False"
        )
    requires_grad = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    if not requires_grad and any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"no input of {type(module).__name__} requires grad, and with use_reentrant=True its "
            "parameters would get no gradient at all; leave use_reentrant at False, or call "
            "enable_input_require_grads() or a similar method"
        )
    return requires_grad


# ------------------------------------------------------------------------------
# Temporarily switch off recompute, whether this project, a library or the model applied it.
# ------------------------------------------------------------------------------

NON_REENTRANT_GENERATOR = "_checkpoint_without_reentrant_generator"
REENTRANT_CLASS = "CheckpointFunction"


class _ReentrantReplacement:
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
    before = {
        name: getattr(torch_checkpoint, name) for name in (NON_REENTRANT_GENERATOR, REENTRANT_CLASS)
    }
    options = [
        (module, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, RecomputeOptions) and value.enabled
    ]
    try:
        # Our own options are disabled too: a reentrant block takes a forward in grad mode for its
        # second one.
        for module, name, value in options:
            module.__dict__[name] = replace(value, enabled=False)
        setattr(torch_checkpoint, NON_REENTRANT_GENERATOR, _nothing_around)
        setattr(torch_checkpoint, REENTRANT_CLASS, _ReentrantReplacement)
        yield
    finally:
        for name, value in before.items():
            setattr(torch_checkpoint, name, value)
        for module, name, value in options:
            module.__dict__[name] = value
