"""Measure compiled code, where dispatch modes see nothing, from the allocator's own events.

Compiled code falls back to eager while a dispatch mode is active, so `LiveStorages` and `FlopCount`
measure eager code there; torch 2.11 and 2.13 also leave the code uncompiled from then on. The
profiler observes below the dispatcher, and compiled code keeps running.

Proof: `python -m pytest tests/core/test_allocated.py`.
"""

import gc
import os
import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import flop_registry

from .blocks import loaded_compiler
from .measure import ATTENTION, FlopCount, Flops, Loss, Memory, measure_memory, untouched

# Memory and FLOPs of compiled steps, from profiler events.

# Name of the profiler's events for allocations, and for frees, whose byte count is negative.
ALLOCATION_EVENT = "[memory]"
FORWARD_END_EVENT = "curry_train: forward ends"
# Without this torch 2.13 writes two lines to standard error for each profile, and 2.11 one.
NO_LOG = {"KINETO_LOG_LEVEL": "99"}


def measure_allocated(module: nn.Module, batch: Any, loss: Loss) -> Memory:
    """Measure memory as `measure_memory` does, for a step that may be compiled.

    An unmeasured step runs first and compiles. In addition to the storages that operations return,
    this counts memory used inside operations, and Python numbers that autograd wraps in tensors.
    """
    if next(module.parameters()).device.type == "cuda":
        # The statistics of CUDA's allocator cover compiled code already.
        return measure_memory(module, batch, loss)

    alive = held = peak = 0
    for event in _profile_step(module, batch, loss):
        if event.name() == FORWARD_END_EVENT:
            held = alive
        elif event.name() == ALLOCATION_EVENT:
            alive += event.nbytes()
            peak = max(peak, alive)
    return Memory(held, peak)


def count_executed_flops(module: nn.Module, batch: Any, loss: Loss) -> Flops:
    """Count FLOPs as `count_flops` does, for a step that may be compiled.

    Matrix products that the compiler emits as kernels of its own, as it does with `max-autotune`,
    are not recorded as operations, and are not counted.
    """
    events = _profile_step(module, batch, loss, shapes=True)
    allocation_times: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event.name() == ALLOCATION_EVENT and event.nbytes() > 0:
            allocation_times[event.start_thread_id()].append(event.start_ns())

    forward = 0
    total = FlopCount()
    ends: dict[int, int] = {}
    for event in events:
        thread = event.start_thread_id()
        if event.name() == FORWARD_END_EVENT:
            forward = total.flops
            continue
        if event.start_ns() < ends.get(thread, 0):
            # This operation runs inside of another, which is counted with all that it calls.
            continue
        operation = _find_counted_operation(event.name())
        if operation is None:
            continue
        ends[thread] = event.end_ns()
        if _has_finished(event, operation, allocation_times[thread]):
            with total:
                _run_on_meta(event, operation)
    return Flops(forward, total.flops - forward)


def _profile_step(module: nn.Module, batch: Any, loss: Loss, *, shapes: bool = False) -> list[Any]:
    """Return the profiler's events of a second step, sorted by start time."""
    with mock.patch.dict(os.environ, NO_LOG | os.environ), untouched(module):
        loss(module, batch).backward()
        module.zero_grad(set_to_none=True)
        gc.collect()
        with profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            record_shapes=shapes,
            acc_events=True,
        ) as profiled:
            value = loss(module, batch)
            with record_function(FORWARD_END_EVENT):
                pass
            value.backward()

    results: Any = profiled.profiler
    return sorted(results.kineto_results.events(), key=lambda event: event.start_ns())


def _find_counted_operation(name: str) -> Any:
    """Return the ATen operation of that name if its FLOPs have a formula, else None."""
    space, _, operation = name.partition("::")
    if space != "aten" or not operation:
        return None
    packet: Any = getattr(torch.ops.aten, operation, None)
    return packet.default if packet in flop_registry or packet in ATTENTION else None


def _has_finished(event: Any, operation: Any, allocation_times: list[int]) -> bool:
    """Return whether an operation finished: early stop of recompute leaves it without output."""
    if len(event.shapes()) > len(operation._schema.arguments):
        # The output was passed in with `out=`, so none is allocated.
        return True
    before = bisect_left(allocation_times, event.start_ns())
    return before < bisect_right(allocation_times, event.end_ns())


def _run_on_meta(event: Any, operation: Any) -> None:
    """Run a recorded operation on meta tensors of the same shapes, to count its FLOPs."""
    recorded = zip(event.shapes(), event.dtypes(), event.concrete_inputs(), strict=True)
    arguments = [
        torch.empty(shape, device="meta")
        if shape and kind not in ("", "Scalar", "ScalarList")
        else value
        for shape, kind, value in recorded
    ]
    # Keyword-only arguments and the output follow; they do not change shapes.
    needed = sum(not argument.kwarg_only for argument in operation._schema.arguments)
    operation(*arguments[:needed])


# Properties of compiled modules, without importing the compiler, which takes seconds.


class BudgetUnsafe(ValueError):
    """Compiling with this memory budget would give wrong gradients without an error."""


class CompileFailed(ValueError):
    """A block that the compiler fails on."""


def holds_compiled_code(module: nn.Module) -> bool:
    """Return whether the module or a submodule runs compiled code.

    A compiled function that a forward calls can't be detected from outside.
    """
    return any(_is_compiled(submodule) for submodule in module.modules())


def _is_compiled(module: nn.Module) -> bool:
    dynamo = loaded_compiler()
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

    call.__code__ = call.__code__.replace(co_name=name)
    return call


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
