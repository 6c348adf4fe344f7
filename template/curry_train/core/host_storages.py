"""Storages offloaded to the host between forward and backward, and their saved tensors.

`Moved` is one storage on the host, `Saved` one tensor that is a view of it, `Stays` a tensor that
is not moved, and `Step` everything that one forward saved.

Proof: `python -m pytest tests/test_offload_contract.py`.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .host_memory import Copies, HostPool
from .recipes import Kept
from .replay import check_unchanged
from .sizes import format_bytes

ONE_ELEMENT = torch.zeros(1, device="cpu")


@dataclass
class OffloadReport:
    """Bytes and storages that one step moved, and the tensors that stayed on the device.

    `skipped` maps each reason for staying to the number of tensors and their bytes.
    """

    moved_bytes: int = 0
    brought_back_bytes: int = 0
    reserved_bytes: int = 0
    num_moved: int = 0
    skipped: dict[str, tuple[int, int]] = field(default_factory=dict)

    def skip(self, tensor: Tensor, reason: str) -> None:
        count, nbytes = self.skipped.get(reason, (0, 0))
        # Sparse tensors do not report their bytes.
        added_bytes = tensor.nbytes if tensor.layout is torch.strided else 0
        self.skipped[reason] = count + 1, nbytes + added_bytes

    def table(self) -> str:
        """Format the report as text of at most 80 columns."""
        moved = format_bytes(self.moved_bytes)
        brought_back = format_bytes(self.brought_back_bytes)
        reserved = format_bytes(self.reserved_bytes)
        lines = [
            f"moved to the host     {moved:>9} in {self.num_moved:,} storages",
            f"brought back          {brought_back:>9}",
            f"host memory reserved  {reserved:>9}",
        ]
        for reason, (count, nbytes) in sorted(self.skipped.items(), key=lambda item: -item[1][1]):
            lines.append(
                f"not moved             {format_bytes(nbytes):>9} in {count:,} tensors: {reason}"
            )
        return "\n".join(lines)


class Lane:
    """Host buffers and copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self.pool = HostPool(pinned=device.type == "cuda")
        self.copies = Copies(device)


class Step:
    """Everything that the blocks saved in one forward; freed when the last part of it is."""

    def __init__(self, owned: frozenset[int]) -> None:
        self.owned = owned
        self.report = OffloadReport()
        self.unpacked = False
        self.moved: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()
        self.order: list[weakref.ref[Saved]] = []
        self.cursor = 0
        self.ahead_bytes = 0
        self.most_bytes = 0

    def move(self, tensor: Tensor, base: Tensor, lane: Lane | None) -> "Saved":
        """Start moving the storage of a tensor to the host; without a lane, only count it."""
        storage = tensor.untyped_storage()
        self.most_bytes = max(self.most_bytes, 2 * storage.nbytes())
        self.report.num_moved += 1
        self.report.moved_bytes += storage.nbytes()
        moved = Moved(self, tensor, base, lane)
        self.moved[storage.data_ptr()] = moved
        return self.save(moved, tensor)

    def save(self, moved: "Moved", tensor: Tensor) -> "Saved":
        saved = Saved(moved, tensor, len(self.order))
        self.order.append(weakref.ref(saved))
        return saved

    def fetch_ahead(self, index: int) -> None:
        """Prefetch the storages that backward needs next, in the reverse order of forward.

        At most twice the bytes of the largest storage are prefetched at a time.
        """
        position = min(self.cursor, index)
        while position > 0:
            saved = self.order[position - 1]()
            if saved is not None and saved.moved.flat is None:
                if self.ahead_bytes + saved.moved.nbytes > self.most_bytes:
                    break
                saved.moved.fetch(ahead=True)
            position -= 1
        self.cursor = position


class Moved:
    """One storage on the host."""

    def __init__(self, step: Step, tensor: Tensor, base: Tensor, lane: Lane | None) -> None:
        self.host: Tensor | None = None
        self.step = step
        self.lane = lane
        self.nbytes = tensor.untyped_storage().nbytes()
        self.source = weakref.ref(tensor.untyped_storage())
        self.base = weakref.ref(base)
        self.version = tensor._version
        self.witness = _witness(tensor)
        self.flat: Tensor | None = None
        self.done: Any = None
        self.num_unasked = 0
        self.ahead = False
        if lane is not None:
            self.host = lane.pool.take(self.nbytes)
            elements = tensor.detach().as_strided((self.nbytes // tensor.itemsize,), (1,), 0)
            lane.copies.out(elements.view(torch.uint8), self.host, most_bytes=step.most_bytes)

    def is_same(self, tensor: Tensor, base: Tensor) -> bool:
        """Return whether the copy still equals what a tensor of the same storage holds now.

        Tensors that are not views of each other have separate versions. An LSTM cell writes such
        chunks of one storage one after the other, so a copy made for the first chunk is out of
        date for the second.
        """
        return self.base() is base and self.version == tensor._version

    def fetch(self, *, ahead: bool) -> Tensor:
        """Start copying the storage back to the device."""
        if self.lane is None or self.host is None:
            raise RuntimeError(
                "this forward runs a backward inside it, so a single forward can't count the "
                "bytes to offload: leave batch out"
            )
        self.flat, self.done = self.lane.copies.back(self.host, self.nbytes)
        self.step.report.brought_back_bytes += self.nbytes
        self.step.ahead_bytes += self.nbytes if ahead else 0
        self.ahead = ahead
        return self.flat

    def ask(self, saved: "Saved") -> Tensor:
        """Return the bytes on the device for the backward of one operation."""
        check_unchanged(self.witness, self.version)
        self.step.unpacked = True
        flat = self.flat
        if flat is None:
            flat = self.fetch(ahead=False)
            self.step.cursor = saved.index

        assert self.lane is not None
        self.lane.copies.wait(self.done)
        self._arrived()
        if not saved.asked:
            saved.asked = True
            self.num_unasked -= 1
        self.release()
        self.step.fetch_ahead(saved.index)
        return flat

    def release(self) -> None:
        """Free the device copy once backward has used every tensor that was saved from it."""
        if self.flat is not None and self.num_unasked <= 0:
            if self.ahead and self.done is not None:
                # Nothing has waited for this copy, and it still writes to the memory freed here.
                self.done.synchronize()
            self._arrived()
            self.flat = None
            self.done = None

    def _arrived(self) -> None:
        if self.ahead:
            self.ahead = False
            self.step.ahead_bytes -= self.nbytes

    def __del__(self) -> None:
        if self.host is not None and self.lane is not None:
            self.lane.pool.give(self.host)


class Saved:
    """One tensor that autograd saved: a view of a storage on the host."""

    __slots__ = ("__weakref__", "asked", "dtype", "index", "moved", "view")

    def __init__(self, moved: Moved, tensor: Tensor, index: int) -> None:
        self.moved = moved
        self.index = index
        self.asked = False
        self.dtype = tensor.dtype
        self.view = tensor.shape, tensor.stride(), tensor.storage_offset()
        moved.num_unasked += 1

    def value(self) -> Tensor:
        return self.moved.ask(self).view(self.dtype).as_strided(*self.view)

    def __del__(self) -> None:
        if not self.asked:
            self.moved.num_unasked -= 1
            self.moved.release()


class Stays(Kept):
    """A saved tensor that stays on the device, checked for changes in place."""

    __slots__ = ("step",)

    def __init__(self, tensor: Tensor, step: Step) -> None:
        super().__init__(tensor)
        self.step = step

    def value(self) -> Tensor:
        self.step.unpacked = True
        return super().value()


class CastAgain(Stays):
    """A lower-precision copy of a parameter, made by autocast and cast again in backward."""

    __slots__ = ("dtype", "view")

    def __init__(self, tensor: Tensor, parameter: Tensor, step: Step) -> None:
        super().__init__(parameter, step)
        self.dtype = tensor.dtype
        self.view = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def value(self) -> Tensor:
        return super().value().to(self.dtype).as_strided(*self.view)


def _witness(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the version counter but not the storage of this one.

    Autograd's check for changes in place needs only the version.
    """
    witness = tensor.detach()
    witness.data = ONE_ELEMENT.expand(tensor.shape)
    return witness
