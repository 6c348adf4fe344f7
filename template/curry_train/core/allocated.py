"""What a step costs where code is compiled: bytes from the allocator's events, FLOPs from what really ran.

Compiled code steps aside while a dispatch mode watches: `LiveStorages` and `FlopCount` read eager code there, and torch
2.11 and 2.13 leave the code uncompiled from then on. The profiler watches from below, and lets it run. Proof:
`python -m pytest tests/test_allocated.py`.
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

ALLOCATION = "[memory]"  # or what was freed
FORWARD_ENDS = "curry_train: forward ends"
QUIET = {
    "KINETO_LOG_LEVEL": "99"
}  # torch 2.13 writes two lines to standard error for each profile, 2.11 one


def measure_allocated(module: nn.Module, batch: Any, loss: Loss) -> Memory:
    """`measure_memory` of a step that may be compiled; one step before it is not measured, and compiles.

    Beside the storages that operations return this counts what they use inside, and the numbers that autograd wraps.
    """
    if next(module.parameters()).device.type == "cuda":
        return measure_memory(module, batch, loss)  # the allocator's figures are those of what ran
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
    """Bytes that autograd keeps for backward, beside parameters, buffers and the batch; quick, and blind for what is
    kept elsewhere, such as the tensors that selective recompute caches."""
    there = [
        *module.parameters(),
        *module.buffers(),
        *(leaf for leaf in tree_iter(batch) if isinstance(leaf, Tensor)),
    ]
    known = {tensor.untyped_storage().data_ptr() for tensor in there}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with untouched(module), saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(module, batch)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def count_executed_flops(module: nn.Module, batch: Any, loss: Loss) -> Flops:
    """`count_flops` of a step that may be compiled. Products that the compiler writes as kernels of its own, which it
    does with `max-autotune`, are no operations and not counted."""
    with untouched(module):
        loss(module, batch).backward()
        module.zero_grad(set_to_none=True)
        with _profiled(memory=True, shapes=True) as events:
            _step(module, batch, loss)
    made: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event.name() == ALLOCATION and event.nbytes() > 0:
            made[event.start_thread_id()].append(event.start_ns())
    forward, total, ends = 0, FlopCount(), dict[int, int]()
    for event in events:
        thread = event.start_thread_id()
        if event.name() == FORWARD_ENDS:
            forward = total.flops
        elif event.start_ns() >= ends.get(thread, 0) and (operation := _counted(event.name())):
            ends[thread] = event.end_ns()  # an operation inside another is part of it
            if _came_to_its_end(event, operation, made[thread]):
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
    """Events by the time at which they began, filled in when the context ends."""
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
        for name in (name for name, value in before.items() if value is None):
            del os.environ[name]
    results: Any = profiled.profiler
    events += sorted(results.kineto_results.events(), key=lambda event: event.start_ns())


def _counted(name: str) -> Any:
    """The operation of that name, where there is a formula for its FLOPs."""
    space, _, operation = name.partition("::")
    packet: Any = (
        getattr(torch.ops.aten, operation, None) if space == "aten" and operation else None
    )
    return (
        packet.default
        if packet in flop_registry or packet in ATTENTION | ATTENTION_BACKWARD
        else None
    )


def _came_to_its_end(event: Any, operation: Any, made: list[int]) -> bool:
    """An operation that recompute's early stop breaks off is an event too, and makes no output."""
    if len(event.shapes()) > len(operation._schema.arguments):
        return True  # it was given its output
    after = bisect_left(made, event.start_ns())
    return after < len(made) and made[after] <= event.end_ns()


def _run_on_meta(event: Any, operation: Any) -> None:
    """The operation on tensors of the same shapes that hold nothing, for its FLOPs."""
    recorded = zip(event.shapes(), event.dtypes(), event.concrete_inputs(), strict=True)
    arguments = [
        torch.empty(shape, device="meta")
        if shape and kind not in ("", "Scalar", "ScalarList")
        else value
        for shape, kind, value in recorded
    ]
    needed = sum(not argument.kwarg_only for argument in operation._schema.arguments)
    operation(*arguments[:needed])  # what follows is the output, or changes values and no shape
