"""One call whose activations are computed again in backward, with what `torch.utils.checkpoint` leaves to its caller.

Running statistics are updated once, and reentrant checkpointing is refused where it would lose gradients. Proof:
`python -m pytest tests/test_recompute_contract.py`.
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
    """How a module recomputes; an attribute of the module, and copied with it."""

    enabled: bool = True
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    determinism_check: str = "default"

    def __post_init__(self) -> None:
        for name in ("enabled", "use_reentrant", "preserve_rng_state"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.determinism_check not in DETERMINISM_CHECKS:
            raise ValueError(
                f"determinism_check must be one of {DETERMINISM_CHECKS}, got {self.determinism_check!r}"
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
    """`run(*args, **kwargs)`, keeping the inputs alone; `modules` are what `run` runs.

    `contexts` makes the two contexts of the first run and of the second, as `torch.utils.checkpoint` takes them.
    """
    if options.use_reentrant and not _gradients_flow(modules[0], args, kwargs):
        return run(*args, **kwargs)  # nothing would be kept for backward anyway
    chosen: dict[str, Any] = {}
    if not torch.compiler.is_compiling():
        if modules:
            args, kwargs = leave_out_caches(modules[0], args, kwargs)
        run = FlatCall(run, args, kwargs)
        args = tuple(run.take_tensors())
        chosen["context_fn"] = functools.partial(_contexts, modules, contexts)
    else:  # the compiler's code takes and saves every tensor, and refuses one that was written over
        run = (
            functools.partial(run, **kwargs) if kwargs else run
        )  # a keyword such as `debug` is the module's own
        chosen |= {"context_fn": contexts} if contexts is not None else {}
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
        **chosen,
    )
    if not torch.compiler.is_compiling():
        _mark(output)
    return output


def _mark(output: Any) -> None:
    """So that nobody makes an output again from what its nodes saved: that may be asked for once."""
    for tensor in tree_leaves(output):
        for made in (tensor, tensor._base) if isinstance(tensor, Tensor) else ():
            if made is not None and made.grad_fn is not None:
                node: Any = made.grad_fn
                node.metadata[AGAIN] = True


def _contexts(modules: Sequence[nn.Module], contexts: Callable[[], Pair] | None) -> Pair:
    if contexts is None:
        return contextlib.nullcontext(), _EachRecompute(modules)
    first, second = contexts()
    return first, _EachRecompute(modules, inside=second)


class _EachRecompute(contextlib.AbstractContextManager[None]):
    """`_statistics_kept` as often as it is entered: with `create_graph=True` one forward is recomputed twice."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        inside: contextlib.AbstractContextManager[Any] | None = None,
    ):
        self.modules, self.inside, self.function_modes = modules, inside, function_modes()
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
    """Running statistics stay as the first forward left them, while the arithmetic is the same.

    A momentum of 0 rather than `track_running_stats` off: autograd has to save as many tensors as the first time.
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
    """Reentrant checkpointing runs without grad mode first, and with it when it recomputes."""

    def run_or_recompute(*args: Any) -> Any:
        with _statistics_kept(modules) if torch.is_grad_enabled() else contextlib.nullcontext():
            return run(*args)

    return run_or_recompute


def _gradients_flow(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is a gradient to compute; an error where reentrant checkpointing would lose one, because it sees
    positional tensors only, and runs backward only through them."""
    nested = tree_leaves(([value for value in args if not isinstance(value, Tensor)], kwargs))
    if any(isinstance(value, Tensor) and value.requires_grad for value in nested):
        raise ValueError(
            f"{type(module).__name__} gets a tensor that requires grad by keyword or inside a container, and with "
            "use_reentrant=True its gradient would be lost; leave use_reentrant at False"
        )
    seen = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    if not seen and any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"no input of {type(module).__name__} requires grad, and with use_reentrant=True its parameters would get "
            "no gradient at all; leave use_reentrant at False, or call enable_input_require_grads() or its like"
        )
    return seen
