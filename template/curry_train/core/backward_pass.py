"""Detection of backward, recomputed forwards and selective checkpointing.

Private torch names for this purpose are used in this file only.

Proof: `python -m pytest tests/test_grad_flow.py`.
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
    """Return whether this thread runs backward, where checkpointing reruns forwards."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Return whether a `torch.func` transform runs; its tensors must not escape from it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run `call` at the end of the current backward, after callbacks that others queue.

    By then gradients have been summed over ranks and sharded.
    """
    engine: Any = Variable._execution_engine
    # A callback queued by a callback runs after all that were queued during backward.
    engine.queue_callback(lambda: engine.queue_callback(call))


@contextlib.contextmanager
def outside_selective_checkpoints() -> Iterator[None]:
    """Suspend selective checkpointing, so that it neither caches nor replays operations.

    Other dispatch modes, such as those that measure or fake, stay active.
    """
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
    """Replace all active dispatch modes by others."""
    for _ in modes:
        dispatch._pop_mode()
    for mode in others:
        dispatch._push_mode(mode)
