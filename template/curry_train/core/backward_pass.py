"""Where a module's call stands: in a forward of training, or in a forward that backward runs once more.

Names that torch keeps to itself for this are in this file alone. Proof: `python -m pytest tests/test_grad_flow.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils import _python_dispatch as dispatch
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def in_backward() -> bool:
    """Whether a backward runs in this thread: every kind of checkpointing runs forward again inside of one."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether a transform of `torch.func` runs, whose tensors must not get out of it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` run when the backward that is running has ended, after what others have asked for by then: the
    gradients are summed over ranks, and sharded."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


@contextlib.contextmanager
def outside_selective_checkpoints() -> Iterator[None]:
    """Operations in here are no part of the block that runs: selective checkpointing neither keeps their outputs nor
    hands them out in the second run. Other dispatch modes, which measure or fake, stay on."""
    modes = dispatch._get_current_dispatch_mode_stack()
    if not any(isinstance(mode, SELECTIVE) for mode in modes):
        yield
        return
    others = [mode for mode in modes if not isinstance(mode, SELECTIVE)]
    _replace(modes, others)
    try:
        yield
    finally:
        _replace(others, modes)


def _replace(modes: list[Any], others: list[Any]) -> None:
    for _ in modes:
        dispatch._pop_mode()
    for mode in others:
        dispatch._push_mode(mode)
