"""Activation checkpointing of one call, on top of `torch.utils.checkpoint`.

BatchNorm's running statistics are updated once, and reentrant checkpointing is refused where it
would lose gradients.

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .flat_call import FlatCall
from .key_cache import leave_out_caches
from .replay import AGAIN, function_modes, function_modes_as

Pair = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
DETERMINISM_CHECKS = ("default", "none")


@dataclass(frozen=True)
class Options:
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
    options: Options,
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
                node.metadata[AGAIN] = True


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
