"""Host copies of tensors, made while training continues, in buffers that are reused.

On CUDA the buffers are pinned, and the copies run on a stream of their own. Not yet measured on
CUDA.
Proof: `python -m pytest tests/test_store_background.py`.
"""

import threading
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor


class Staging:
    """Copies tensors to host memory in another thread.

    Call `begin` on the training thread, `copy` on the other one, and `wait` on the training thread
    before the tensors change.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._sources: Sequence[Tensor] = ()
        self._copied = threading.Event()
        self._copied.set()
        # CUDA event: the sources are computed.
        self._ready: Any = None
        # CUDA event: the copies are complete.
        self._done: Any = None
        self._stream: Any = None

    def begin(self, sources: Sequence[Tensor]) -> None:
        """Set the tensors to copy; they must not change until `wait` returns."""
        self._sources = sources
        self._ready = None
        self._done = None

        device = next((source.device for source in sources if source.is_cuda), None)
        if device is not None:
            self._stream = self._stream or torch.cuda.Stream(device)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))
        self._copied.clear()

    def copy(self) -> Sequence[Tensor]:
        """Copy the tensors, and return the copies when they are complete."""
        try:
            self._fit_buffers()
            if self._stream is None or self._ready is None:
                self._copy_all(non_blocking=False)
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._ready)
                    self._copy_all(non_blocking=True)
                    self._done = torch.cuda.Event()
                    self._done.record(self._stream)
        finally:
            self._sources = ()
            self._copied.set()
        if self._done is not None:
            self._done.synchronize()
        return self._buffers

    def wait(self) -> None:
        """Wait until the sources may change; on CUDA the device waits, not the host."""
        self._copied.wait()
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    def release(self) -> None:
        """Free the buffers."""
        self._buffers = []

    def _fit_buffers(self) -> None:
        buffers = []
        for source, buffer in zip_longest(self._sources, self._buffers[: len(self._sources)]):
            reusable = buffer is not None and _fits(buffer, source)
            buffers.append(buffer if reusable else _buffer(source))
        self._buffers = buffers

    def _copy_all(self, *, non_blocking: bool) -> None:
        for buffer, source in zip(self._buffers, self._sources, strict=True):
            buffer.copy_(source, non_blocking=non_blocking)


def _fits(buffer: Tensor, source: Tensor) -> bool:
    same_pinning = True
    if torch.cuda.is_available():
        same_pinning = buffer.is_pinned() == source.is_cuda
    return buffer.shape == source.shape and buffer.dtype == source.dtype and same_pinning


def _buffer(source: Tensor) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
