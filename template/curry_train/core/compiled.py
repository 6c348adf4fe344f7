"""What is to be known about compiled code without importing the compiler, which takes seconds.

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
    """Compiled with this budget, gradients would be wrong, and nothing else would say so."""


class CompileFailed(RuntimeError):
    """The compiler could not make code of a block."""


def holds_compiled_code(module: nn.Module) -> bool:
    """Whether some part of a module runs compiled. A function that a forward calls and that was compiled by itself
    can't be seen from outside."""
    return any(_is_compiled(part) for part in module.modules())


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")  # whatever is compiled has imported it
    return (
        getattr(type(module), "runs_compiled_code", False)
        or module.__dict__.get("_compiled_call_impl") is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))
    )


def with_own_code(function: Callable[..., Any], *, name: str) -> Callable[..., Any]:
    """A function that calls `function`, with a code object that nobody else has: torch keeps compiled code and counts
    recompilations for each code object, and after eight runs it uncompiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(
        call.__code__.replace(co_name=name), globals(), name, None, call.__closure__
    )


def current_budget() -> float:
    """The budget that whatever is compiled now gets: a setting of this thread, in torch 2.11 of the process."""
    return float(functorch_config.activation_memory_budget)


@contextmanager
def warnings_of_the_compiler_ignored() -> Iterator[None]:
    """Where warnings are errors, as in many tests, torch 2.11 and 2.13 trip over their own while they trace."""
    with warnings.catch_warnings():
        for message in (
            "The .grad attribute of a Tensor",
            ".*should not be instantiated",
            ".*torch.jit.script_method",
        ):
            warnings.filterwarnings("ignore", message)
        yield
