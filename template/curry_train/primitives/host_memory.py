"""Host memory for offloaded activations: available bytes, buffers, device copies.

Proof: `python -m pytest tests/primitives/test_host_memory.py`.
"""

import mmap
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOST_MEMORY_ADVICE = (
    "offload fewer blocks (blocks=, keep_last=), raise min_bytes, recompute some blocks instead, "
    "use a smaller batch, or give the machine or its control group more memory"
)


class HostMemoryShort(RuntimeError):
    """The host has less memory available than an offload needs."""


def available_host_bytes(system: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that this process may still allocate.

    This is the kernel's `MemAvailable`, or what a control group leaves if that is less. None if
    the system reports neither, as on macOS.
    """
    found = [*_kernel_bytes(system / "proc/meminfo"), *_group_bytes(system)]
    return min(found, default=None)


def require_host_memory(needed: int) -> None:
    """Raise if less than `needed` bytes of host memory are available."""
    available = available_host_bytes()
    if available is not None and needed > available:
        raise HostMemoryShort(
            f"offload needs {needed / 2**20:,.2f} MiB more of host memory and "
            f"{max(0, available) / 2**20:,.2f} MiB is available: {HOST_MEMORY_ADVICE}"
        )


def _kernel_bytes(meminfo: Path) -> Iterator[int]:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                yield int(value.split()[0]) * 1024


def _group_bytes(system: Path) -> Iterator[int]:
    """Yield the bytes left under the limit of each control group above this process.

    File pages that the kernel can drop do not count as used.
    """
    membership = system / "proc/self/cgroup"
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = "sys/fs/cgroup"
            limit = "memory.max"
            used = "memory.current"
            droppable = "inactive_file"
        elif "memory" in controllers.split(","):
            root = "sys/fs/cgroup/memory"
            limit = "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
            droppable = "total_inactive_file"
        else:
            continue

        # In a container only the root group may be visible.
        folder = Path(path.strip("/"))
        for group in dict.fromkeys([folder, *folder.parents, Path()]):
            group_path = system / root / group
            if not (group_path / limit).is_file() or not (group_path / used).is_file():
                continue
            limit_text = (group_path / limit).read_text().strip()
            if limit_text != "max":
                used_bytes = int((group_path / used).read_text())
                droppable_bytes = _statistic(group_path / "memory.stat", droppable)
                yield int(limit_text) - used_bytes + droppable_bytes


def _statistic(path: Path, name: str) -> int:
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def host_buffer(nbytes: int, *, pinned: bool) -> Tensor:
    """Allocate bytes on the host.

    Torch caches pinned memory, and gives it out again once the copies that used it are done.
    """
    try:
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        # No torch operation creates this buffer, so that an instrument which measures a CPU in
        # place of a device does not count it as memory of that device.
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        # CUDA raises its out-of-memory error for host memory too.
        raise HostMemoryShort(
            f"the host gave no {nbytes / 2**20:,.2f} MiB ({error}): {HOST_MEMORY_ADVICE}"
        ) from error


class HostCopies:
    """Copies between one device and the host, in call order, beside the computation on CUDA.

    On CUDA all copies run in one stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[tuple[Any, Tensor, Tensor]] = deque()
        self._leaving_bytes = 0

    def out(self, source: Tensor, host: Tensor, *, most_bytes: int) -> None:
        """Start a copy to the host, and keep both tensors alive until the copy is done.

        At most `most_bytes` of sources are kept alive at a time.
        """
        done = self._copy(host[: source.nbytes], source)
        if done is not None:
            self._leaving.append((done, source, host))
            self._leaving_bytes += source.nbytes
            self._let_go(most_bytes)

    def back(self, host: Tensor, nbytes: int) -> tuple[Tensor, Any]:
        """Start a copy to the device; return the target and the event to pass to `wait` first."""
        self._let_go(self._leaving_bytes)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return target, self._copy(target, host[:nbytes])

    def wait(self, done: Any) -> None:
        """Make the computation stream wait for a copy, without blocking the host."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def _let_go(self, most_bytes: int) -> None:
        """Release sources whose copies are done, until at most `most_bytes` are held.

        Over that limit, the computation waits for the oldest copy. Memory that is freed after the
        wait is not overwritten before the copy is done.
        """
        while self._leaving:
            done, source, _ = self._leaving[0]
            if not done.query():
                if self._leaving_bytes <= most_bytes:
                    return
                self.wait(done)
            self._leaving.popleft()
            self._leaving_bytes -= source.nbytes

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Start a copy and return the event that marks its end, or None if it is done already."""
        if self.stream is None:
            target.copy_(source)
            return None

        # The computation stream made the source, and may still be using the target.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()
