"""Properties of compiled modules, without importing the compiler, which takes seconds.

Proof: `python -m pytest tests/test_allocated.py`.
"""

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._functorch.config as functorch_config
from torch import nn


class BudgetUnsafe(ValueError):
    """Compiling with this memory budget would give wrong gradients without an error."""


class CompileFailed(RuntimeError):
    """The compiler failed on a block."""


def holds_compiled_code(module: nn.Module) -> bool:
    """Return whether the module or a submodule runs compiled code.

    A compiled function that a forward calls can't be detected from outside.
    """
    return any(_is_compiled(submodule) for submodule in module.modules())


def _is_compiled(module: nn.Module) -> bool:
    # Compiling anything imports this module.
    dynamo = sys.modules.get("torch._dynamo")
    return (
        getattr(type(module), "runs_compiled_code", False)
        or module.__dict__.get("_compiled_call_impl") is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))
    )


def with_own_code(function: Callable[..., Any], *, name: str) -> Callable[..., Any]:
    """Wrap `function` in a function with a code object of its own.

    torch caches compiled code and counts recompilations for each code object; after eight of them
    it runs the function uncompiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(
        call.__code__.replace(co_name=name), globals(), name, None, call.__closure__
    )


def current_budget() -> float:
    """Return the memory budget for compiling now: per thread, in torch 2.11 per process."""
    return float(functorch_config.activation_memory_budget)


@contextmanager
def warnings_of_the_compiler_ignored() -> Iterator[None]:
    """Ignore torch's own warnings during tracing.

    Where warnings are errors, as in many tests, torch 2.11 and 2.13 fail on them.
    """
    with warnings.catch_warnings():
        for message in (
            "The .grad attribute of a Tensor",
            ".*should not be instantiated",
            ".*torch.jit.script_method",
        ):
            warnings.filterwarnings("ignore", message)
        yield
