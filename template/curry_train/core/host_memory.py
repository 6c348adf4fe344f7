"""Host memory for what leaves the device: how much there is, buffers that are used again, and the copies to and fro.

Proof: `python -m pytest tests/test_host_memory.py`.
"""

import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .sizes import format_bytes

PAGE = 4096
ADVICE = (
    "offload fewer blocks (blocks=, keep_last=), raise min_bytes, recompute some blocks instead, use a smaller batch, "
    "or give the machine or its control group more memory"
)
LOOSEST_FIT = 4  # a buffer this many times too large still serves, so that batches of other lengths need no new ones


class HostMemoryShort(RuntimeError):
    """The host has less memory than what was asked of it."""


def available_host_bytes(system: Path = Path("/")) -> int | None:
    """What this process may still take: the kernel's `MemAvailable`, or what a control group leaves if that is less.

    None where the system says neither, as macOS does.
    """
    found = [*_kernel_bytes(system / "proc/meminfo"), *_group_bytes(system)]
    return min(found, default=None)


def require_host_memory(needed: int) -> None:
    """Raise where the host can't give so many bytes more."""
    there = available_host_bytes()
    if there is not None and needed > there:
        raise HostMemoryShort(
            f"offload needs {format_bytes(needed)} more of host memory and {format_bytes(max(0, there))} is available: "
            + ADVICE
        )


def _kernel_bytes(meminfo: Path) -> Iterator[int]:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                yield int(value.split()[0]) * 1024


def _group_bytes(system: Path) -> Iterator[int]:
    """What the limit of each control group above this process leaves; file pages that can be dropped are not in use."""
    membership = system / "proc/self/cgroup"
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, droppable = (
                "sys/fs/cgroup",
                "memory.max",
                "memory.current",
                "inactive_file",
            )
        elif "memory" in controllers.split(","):
            root, limit, used = (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            droppable = "total_inactive_file"
        else:
            continue
        folder = Path(path.strip("/"))
        for group in dict.fromkeys(
            [folder, *folder.parents, Path()]
        ):  # in a container only the last may be visible
            at = system / root / group
            if (at / limit).is_file() and (at / used).is_file():
                most = (at / limit).read_text().strip()
                if most != "max":
                    yield (
                        int(most)
                        - int((at / used).read_text())
                        + _statistic(at / "memory.stat", droppable)
                    )


def _statistic(path: Path, name: str) -> int:
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


class HostPool:
    """Flat buffers of bytes on the host, pinned for a CUDA device, which go from one step to the next.

    Giving a buffer back may happen anywhere, even while garbage is collected, so it takes no lock.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.reserved_bytes = 0
        self._idle: dict[int, list[Tensor]] = {}
        self._returned: deque[Tensor] = deque()
        self._lock = threading.Lock()

    def capacity(self, nbytes: int) -> int:
        """What a buffer for so many bytes takes: torch's pinned memory comes in powers of two, other in pages."""
        return 1 << (nbytes - 1).bit_length() if self.pinned else -(-nbytes // PAGE) * PAGE

    def reserve(self, sizes: Iterable[int]) -> None:
        """Have buffers for all of these at once, or say that there is no memory for them before any is taken."""
        with self._lock:
            self._settle()
            spare = {capacity: len(idle) for capacity, idle in self._idle.items()}
            missing = []
            for capacity in map(self.capacity, sizes):
                if spare.get(capacity, 0):
                    spare[capacity] -= 1
                else:
                    missing.append(capacity)
            require_host_memory(sum(missing))
            for capacity in missing:
                self._idle.setdefault(capacity, []).append(
                    self._allocate(capacity).zero_()
                )  # its pages are there then

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least so many bytes."""
        with self._lock:
            self._settle()
            wanted = self.capacity(nbytes)
            fitting = [
                size
                for size, idle in self._idle.items()
                if idle and wanted <= size <= LOOSEST_FIT * wanted
            ]
            if fitting:
                return self._idle[min(fitting)].pop()
            self._drop_idle(wanted)
            require_host_memory(wanted)
            return self._allocate(wanted)

    def give(self, buffer: Tensor) -> None:
        self._returned.append(buffer)

    def clear(self) -> None:
        """Let go of all that is not in use."""
        with self._lock:
            self._settle()
            self._drop_idle(self.reserved_bytes)

    def _settle(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._idle.setdefault(buffer.nbytes, []).append(buffer)

    def _drop_idle(self, nbytes: int) -> None:
        """What fits nothing makes room for what does, so that the pool does not grow with every new batch size."""
        for size in sorted(self._idle, reverse=True):
            while self._idle[size] and nbytes > 0:
                self._idle[size].pop()
                nbytes -= size
                self.reserved_bytes -= size
            if not self._idle[size]:
                del self._idle[size]

    def _allocate(self, capacity: int) -> Tensor:
        kind = "pinned memory" if self.pinned else "memory"
        try:
            if self.pinned:
                buffer = torch.empty(capacity, dtype=torch.uint8, device="cpu", pin_memory=True)
            else:  # no operation makes it, so no instrument takes it for memory of the device that a CPU stands for
                buffer = torch.frombuffer(mmap.mmap(-1, capacity), dtype=torch.uint8)
        except (
            OSError,
            RuntimeError,
        ) as error:  # CUDA says that it is out of memory, and means the host's
            raise HostMemoryShort(
                f"the host gave no {format_bytes(capacity)} of {kind} ({error}): {ADVICE}"
            ) from error
        self.reserved_bytes += capacity
        return buffer


class Copies:
    """Copies between one device and the host: on CUDA in one stream beside the computation, so in the order of calls.

    That order is why a host buffer may go to its next user at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._leaving_bytes = 0

    def out(self, source: Tensor, host: Tensor, *, most_bytes: int) -> None:
        """Start a copy to the host. The source stays alive until it is done; of all of them `most_bytes` at most."""
        done = self._copy(host[: source.nbytes], source)
        if done is not None:
            self._leaving.append((done, source))
            self._leaving_bytes += source.nbytes
            self._let_go(most_bytes)

    def back(self, host: Tensor, nbytes: int) -> tuple[Tensor, Any]:
        """Bytes on the device, to be used after `wait` for what comes with them."""
        self._let_go(self._leaving_bytes)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return target, self._copy(target, host[:nbytes])

    def wait(self, done: Any) -> None:
        """Have the computation wait for a copy; the host goes on."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def _let_go(self, most_bytes: int) -> None:
        """Memory that is freed behind a wait of the computation is not written to before the copy is done."""
        while self._leaving:
            done, source = self._leaving[0]
            if not done.query():
                if self._leaving_bytes <= most_bytes:
                    return
                self.wait(done)
            self._leaving.popleft()
            self._leaving_bytes -= source.nbytes

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Start the copy and return the event that tells its end; None where it is done already."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(
            torch.cuda.current_stream(self.device)
        )  # it made the source, and has used the target
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()
