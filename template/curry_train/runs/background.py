"""Save in the background from a copy of one moment.

A thread copies parameters and optimizer state during the next forward and backward pass; a hook
makes the optimizers' next step wait for the copies. Then the thread writes and commits. Only one
save runs at a time, on a thread that ends with it. Torch's `async_save`, in contrast, stalls
training for the whole copy, and reusing its stager corrupts a save that is still running.

Proof: `python -m pytest tests/runs/test_store_background.py`.
"""

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .format import Writing
from .layout import Metric, SavedCheckpoint
from .ranks import Ranks
from .store import Savable, Store
from .values import is_plain

# Host copies of tensors, made while training continues, in buffers that are reused.


class Staging:
    """Copies tensors to host memory, in another thread than the one that changes them."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        # The CUDA stream of the copies.
        self.stream: Any = None

    def begin(self, sources: Sequence[Tensor]) -> Callable[[], Any]:
        """Return a function for the other thread: it copies what is computed by now.

        The sources must not change until it returns. For tensors on a GPU it returns an event, for
        which whatever changes the sources or reads the copies still has to wait.
        """
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is None:
            return functools.partial(self._copy_all, sources)
        stream = self.stream = self.stream or torch.cuda.Stream(device)
        computed = torch.cuda.current_stream(device).record_event()

        def copy() -> Any:
            with torch.cuda.stream(stream):
                stream.wait_event(computed)
                self._copy_all(sources)
                return stream.record_event()

        return copy

    def _copy_all(self, sources: Sequence[Tensor]) -> None:
        forms = [(one.shape, one.dtype, one.is_cuda) for one in sources]
        if forms != [(one.shape, one.dtype, one.is_pinned()) for one in self.buffers]:
            self.buffers = [
                torch.empty(shape, dtype=dtype, pin_memory=is_pinned)
                for shape, dtype, is_pinned in forms
            ]
        for buffer, source in zip(self.buffers, sources, strict=True):
            if is_plain(source) and source.is_cpu and source.is_contiguous() and source.numel():
                # Torch would copy with as many threads as the training computes with, in turn with
                # those.
                own = source.detach().resolve_conj().resolve_neg()
                target = buffer.reshape(-1).view(torch.uint8).numpy()
                numpy.copyto(target, own.reshape(-1).view(torch.uint8).numpy())
            else:
                buffer.copy_(source, non_blocking=source.is_cuda)


# Save checkpoints on a background thread while training continues.

logger = logging.getLogger(__name__)


class BackgroundSaver:
    """Save one checkpoint at a time on a background thread.

    Use as a context manager, or call `finish` at the end. An error of a save is raised at the next
    optimizer step, save or `finish`. `stalled` sums the seconds that the training thread waited.
    `timeout` is how many seconds a rank waits for the parts of the other ranks. Code other than the
    optimizers that changes parameters has to call `wait_copied` first.
    """

    def __init__(self, store: Store, *, timeout: float = 1800.0) -> None:
        self.store = store
        # Only the threads of the saves use this group.
        self._ranks = Ranks.on_the_host(timeout=timeout)
        self.stalled = 0.0
        self._staging = Staging()
        # The copies of the last save, with the event after them on a GPU.
        self._copied: Future[Any] | None = None
        self._running: Future[SavedCheckpoint] | None = None
        # The hook of the running save.
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> "BackgroundSaver":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        try:
            # After an error the ranks may be at different places, so don't use collectives.
            if error is None:
                self.finish()
        finally:
            if self._running is not None:
                # Waits for the save, whose error is in the log.
                self._running.exception()
            self._hooks.close()
            # Frees the buffers.
            self._copied = None
            self._staging = Staging()

    def save(self, kind: str, step: int, state: Savable, *, metric: Metric | None = None) -> None:
        """Begin a save and return before it is copied.

        Waits for the previous save, and raises its error.
        """
        began = time.perf_counter()
        Ranks().all_do(self._settle)
        writing = self.store.begin(kind, step, state, metric=metric)
        pool = ThreadPoolExecutor(1)
        self._copied = pool.submit(self._staging.begin([*writing.tensors.values()]))
        self._running = pool.submit(self._run, writing, self._copied)
        # The thread ends with the save.
        pool.shutdown(wait=False)
        self.stalled += time.perf_counter() - began
        if writing.snapshot.optimizers:
            # Not of these objects, which may be wrappers of those that step.
            self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        else:
            # Nothing else waits before the tensors change.
            self.wait_copied()

    def wait_copied(self) -> None:
        """Wait until the parameters may change; on CUDA the device waits, not the host."""
        began = time.perf_counter()
        # An error of the copies is one of the save.
        if self._copied is not None and self._copied.exception() is None:
            done = self._copied.result()
            if done is not None:
                torch.cuda.current_stream(self._staging.stream.device).wait_event(done)
        self.stalled += time.perf_counter() - began

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the running save, if there is one; return on every rank what it committed."""
        return Ranks().all_do(self._settle)

    def _settle(self) -> SavedCheckpoint | None:
        running = self._running
        self._running = None
        self._hooks.close()
        return None if running is None else running.result()

    def _before_step(self, *_: Any) -> None:
        self.wait_copied()
        if self._running and self._running.done() and self._running.exception():
            self._settle()

    def _run(self, writing: Writing, copied: Future[Any]) -> SavedCheckpoint:
        """Write and commit; runs on the background thread, like those of the other ranks."""

        def write() -> Any:
            done = copied.result()
            if done is not None:
                done.synchronize()
            # Training may wait for the copies, so they are made at full speed. From here on this
            # thread gets less of the cores than those that train: on Linux it is a thread that is
            # nice, not its process. Where a sandbox forbids it, it competes as before.
            if sys.platform == "linux":
                with contextlib.suppress(OSError):
                    os.nice(5)
            writing.tensors = dict(zip(writing.tensors, self._staging.buffers, strict=True))
            return writing.write()

        try:
            writing.ranks = self._ranks
            return self.store.finish(writing, write)
        except Exception as error:
            # No call may follow that raises it.
            logger.error("%s", error)
            raise
