"""Copies of tensors in the host's memory, made while training goes on, in buffers that the next save uses again.

On CUDA the buffers are pinned and a stream of their own copies; not yet measured on CUDA.
Proof: `python -m pytest tests/test_store_background.py`.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Staging:
    """`begin` on the training thread, `copy` on another, `wait` on the training thread before the tensors change."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._sources: Sequence[Tensor] = ()
        self._copied = threading.Event()
        self._copied.set()
        self._ready: Any = None  # CUDA events: the sources are computed; the copies are made
        self._done: Any = None
        self._stream: Any = None

    def begin(self, sources: Sequence[Tensor]) -> None:
        """From here until `wait` returns the sources must not change."""
        self._sources, self._ready, self._done = sources, None, None
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is not None:
            self._stream = self._stream or torch.cuda.Stream(device)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))
        self._copied.clear()

    def copy(self) -> Sequence[Tensor]:
        """The copies, once they are made."""
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
        """Until the sources may change; on CUDA the device waits, not the host."""
        self._copied.wait()
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    def release(self) -> None:
        """Let go of the buffers."""
        self._buffers = []

    def _fit_buffers(self) -> None:
        kept = self._buffers[: len(self._sources)]
        self._buffers = [
            old if old is not None and _fits(old, source) else _buffer(source)
            for source, old in zip(
                self._sources, [*kept, *[None] * (len(self._sources) - len(kept))], strict=True
            )
        ]

    def _copy_all(self, *, non_blocking: bool) -> None:
        for buffer, source in zip(self._buffers, self._sources, strict=True):
            buffer.copy_(source, non_blocking=non_blocking)


def _fits(buffer: Tensor, source: Tensor) -> bool:
    pinned = buffer.is_pinned() == source.is_cuda if torch.cuda.is_available() else True
    return buffer.shape == source.shape and buffer.dtype == source.dtype and pinned


def _buffer(source: Tensor) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
