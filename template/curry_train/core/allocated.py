"""Memory and FLOPs of compiled steps, from profiler events.

Compiled code falls back to eager while a dispatch mode is active, so `LiveStorages` and `FlopCount`
measure eager code there; torch 2.11 and 2.13 also leave the code uncompiled from then on. The
profiler observes below the dispatcher, and compiled code keeps running.

Proof: `python -m pytest tests/test_allocated.py`.
"""

import gc
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from .flops import ATTENTION, ATTENTION_BACKWARD
from .measure import FlopCount, Flops, Loss, Memory, measure_memory
from .untouched import untouched

# Name of the profiler's events for allocations, and for frees, whose byte count is negative.
ALLOCATION = "[memory]"
FORWARD_ENDS = "curry_train: forward ends"
# Without this torch 2.13 writes two lines to standard error for each profile, and 2.11 one.
QUIET = {"KINETO_LOG_LEVEL": "99"}


def measure_allocated(module: nn.Module, batch: Any, loss: Loss) -> Memory:
    """Measure memory as `measure_memory` does, for a step that may be compiled.

    An unmeasured step runs first and compiles. In addition to the storages that operations return,
    this counts memory used inside operations, and Python numbers that autograd wraps in tensors.
    """
    if next(module.parameters()).device.type == "cuda":
        # The statistics of CUDA's allocator cover compiled code already.
        return measure_memory(module, batch, loss)

    with untouched(module):
        loss(module, batch).backward()
        module.zero_grad(set_to_none=True)
        gc.collect()
        with _profiled(memory=True) as events:
            _step(module, batch, loss)

    alive = held = peak = 0
    for event in events:
        if event.name() == FORWARD_ENDS:
            held = alive
        elif event.name() == ALLOCATION:
            alive += event.nbytes()
            peak = max(peak, alive)
    return Memory(held, peak)


def saved_bytes(module: nn.Module, batch: Any, loss: Loss) -> int:
    """Count bytes that autograd saves for backward, less parameters, buffers and the batch.

    This is fast, but misses tensors kept outside autograd, such as those that selective recompute
    caches.
    """
    inputs = [leaf for leaf in tree_iter(batch) if isinstance(leaf, Tensor)]
    excluded = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*module.parameters(), *module.buffers(), *inputs)
    }
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in excluded:
            saved[address] = tensor
        return tensor

    with untouched(module), saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(module, batch)
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def count_executed_flops(module: nn.Module, batch: Any, loss: Loss) -> Flops:
    """Count FLOPs as `count_flops` does, for a step that may be compiled.

    Matrix products that the compiler emits as kernels of its own, as it does with `max-autotune`,
    are not recorded as operations, and are not counted.
    """
    with untouched(module):
        loss(module, batch).backward()
        module.zero_grad(set_to_none=True)
        with _profiled(memory=True, shapes=True) as events:
            _step(module, batch, loss)

    allocation_times: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event.name() == ALLOCATION and event.nbytes() > 0:
            allocation_times[event.start_thread_id()].append(event.start_ns())

    forward = 0
    total = FlopCount()
    ends: dict[int, int] = {}
    for event in events:
        thread = event.start_thread_id()
        if event.name() == FORWARD_ENDS:
            forward = total.flops
            continue
        if event.start_ns() < ends.get(thread, 0):
            # This operation runs inside of another, which is counted with all that it calls.
            continue
        operation = _counted(event.name())
        if operation is None:
            continue
        ends[thread] = event.end_ns()
        if _came_to_its_end(event, operation, allocation_times[thread]):
            with total:
                _run_on_meta(event, operation)
    return Flops(forward, total.flops - forward)


def _step(module: nn.Module, batch: Any, loss: Loss) -> None:
    value = loss(module, batch)
    with record_function(FORWARD_ENDS):
        pass
    value.backward()


@contextmanager
def _profiled(*, memory: bool = False, shapes: bool = False) -> Iterator[list[Any]]:
    """Yield a list that is filled with events, sorted by start time, when the context ends."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update({name: value for name, value in QUIET.items() if before[name] is None})
    events: list[Any] = []
    try:
        with profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=memory,
            record_shapes=shapes,
            acc_events=True,
        ) as profiled:
            yield events
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]

    results: Any = profiled.profiler
    events += sorted(results.kineto_results.events(), key=lambda event: event.start_ns())


def _counted(name: str) -> Any:
    """Return the ATen operation of that name if its FLOPs have a formula, else None."""
    space, _, operation = name.partition("::")
    if space != "aten" or not operation:
        return None
    packet: Any = getattr(torch.ops.aten, operation, None)
    has_formula = packet in flop_registry or packet in ATTENTION | ATTENTION_BACKWARD
    return packet.default if has_formula else None


def _came_to_its_end(event: Any, operation: Any, allocation_times: list[int]) -> bool:
    """Return whether an operation finished: early stop of recompute leaves it without output."""
    if len(event.shapes()) > len(operation._schema.arguments):
        # The output was passed in with `out=`, so none is allocated.
        return True
    after = bisect_left(allocation_times, event.start_ns())
    return after < len(allocation_times) and allocation_times[after] <= event.end_ns()


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
