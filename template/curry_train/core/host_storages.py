"""Storages that are on the host between forward and backward, and what autograd holds in place of the tensors.

A `Moved` is one storage, a `Saved` one tensor that is a view of it, a `Stays` a tensor that is not moved, and a `Step`
what one forward saved of all three. Proof: `python -m pytest tests/test_offload_contract.py`.
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
    """What one step moved: bytes to the host and back, storages, and what stayed, as count and bytes by reason."""

    moved_bytes: int = 0
    brought_back_bytes: int = 0
    reserved_bytes: int = 0
    num_moved: int = 0
    skipped: dict[str, tuple[int, int]] = field(default_factory=dict)

    def skip(self, tensor: Tensor, reason: str) -> None:
        count, nbytes = self.skipped.get(reason, (0, 0))
        own = tensor.nbytes if tensor.layout is torch.strided else 0  # sparse tensors do not tell
        self.skipped[reason] = count + 1, nbytes + own

    def table(self) -> str:
        """Text of at most 80 columns."""
        lines = [
            f"moved to the host     {format_bytes(self.moved_bytes):>9} in {self.num_moved:,} storages",
            f"brought back          {format_bytes(self.brought_back_bytes):>9}",
            f"host memory reserved  {format_bytes(self.reserved_bytes):>9}",
        ]
        for reason, (count, nbytes) in sorted(self.skipped.items(), key=lambda item: -item[1][1]):
            lines.append(
                f"not moved             {format_bytes(nbytes):>9} in {count:,} tensors: {reason}"
            )
        return "\n".join(lines)


class Lane:
    """The host buffers and the copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self.pool, self.copies = HostPool(pinned=device.type == "cuda"), Copies(device)


class Step:
    """What the blocks saved in one forward of the model; it lives as long as something of it does."""

    def __init__(self, owned: frozenset[int]) -> None:
        self.owned, self.report, self.unpacked = owned, OffloadReport(), False
        self.moved: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()
        self.order: list[weakref.ref[Saved]] = []
        self.cursor, self.ahead_bytes, self.most_bytes = 0, 0, 0

    def move(self, tensor: Tensor, base: Tensor, lane: Lane | None) -> "Saved":
        """Start to move the storage of a tensor; without a lane it is counted only."""
        storage = tensor.untyped_storage()
        self.most_bytes = max(self.most_bytes, 2 * storage.nbytes())
        self.report.num_moved += 1
        self.report.moved_bytes += storage.nbytes()
        moved = self.moved[storage.data_ptr()] = Moved(self, tensor, base, lane)
        return self.save(moved, tensor)

    def save(self, moved: "Moved", tensor: Tensor) -> "Saved":
        saved = Saved(moved, tensor, len(self.order))
        self.order.append(weakref.ref(saved))
        return saved

    def fetch_ahead(self, index: int) -> None:
        """Start to bring back what backward, in the order opposite to forward, is about to ask for.

        As many bytes are on their way at most as the two largest storages may have.
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
        self.step, self.lane, self.nbytes = step, lane, tensor.untyped_storage().nbytes()
        self.source, self.base, self.version = (
            weakref.ref(tensor.untyped_storage()),
            weakref.ref(base),
            tensor._version,
        )
        self.witness = _witness(tensor)
        self.flat: Tensor | None = None
        self.done: Any = None
        self.num_unasked, self.ahead = 0, False
        if lane is not None:
            self.host = lane.pool.take(self.nbytes)
            elements = tensor.detach().as_strided((self.nbytes // tensor.itemsize,), (1,), 0)
            lane.copies.out(elements.view(torch.uint8), self.host, most_bytes=step.most_bytes)

    def is_same(self, tensor: Tensor, base: Tensor) -> bool:
        """Whether what was copied is what the tensor, of the same storage, holds now.

        Tensors that are no views of each other have versions of their own. An LSTM cell writes such chunks of one
        storage one after the other, so a copy made for the first is too old for the second.
        """
        return self.base() is base and self.version == tensor._version

    def fetch(self, *, ahead: bool) -> Tensor:
        """Start to bring the storage back."""
        if self.lane is None or self.host is None:
            raise RuntimeError(
                "this forward runs a backward of its own, so one forward can't count its bytes: leave batch out"
            )
        self.flat, self.done = self.lane.copies.back(self.host, self.nbytes)
        self.step.report.brought_back_bytes += self.nbytes
        self.step.ahead_bytes += self.nbytes if ahead else 0
        self.ahead = ahead
        return self.flat

    def ask(self, saved: "Saved") -> Tensor:
        """The bytes on the device, for the backward of one operation."""
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
        """Let go of what is back on the device once all that was saved of it has been asked for."""
        if self.flat is not None and self.num_unasked <= 0:
            if self.ahead and self.done is not None:
                self.done.synchronize()  # nobody has waited for this copy, and it writes to what is freed here
            self._arrived()
            self.flat = self.done = None

    def _arrived(self) -> None:
        if self.ahead:
            self.ahead = False
            self.step.ahead_bytes -= self.nbytes

    def __del__(self) -> None:
        if self.host is not None and self.lane is not None:
            self.lane.pool.give(self.host)


class Saved:
    """One tensor that autograd saved: a view of a storage that was moved."""

    __slots__ = ("__weakref__", "asked", "dtype", "index", "moved", "view")

    def __init__(self, moved: Moved, tensor: Tensor, index: int) -> None:
        self.moved, self.index, self.asked, self.dtype = moved, index, False, tensor.dtype
        self.view = tensor.shape, tensor.stride(), tensor.storage_offset()
        moved.num_unasked += 1

    def value(self) -> Tensor:
        return self.moved.ask(self).view(self.dtype).as_strided(*self.view)

    def __del__(self) -> None:
        if not self.asked:
            self.moved.num_unasked -= 1
            self.moved.release()


class Stays(Kept):
    """A tensor that stays on the device, and checks that it is what it was."""

    __slots__ = ("step",)

    def __init__(self, tensor: Tensor, step: Step) -> None:
        super().__init__(tensor)
        self.step = step

    def value(self) -> Tensor:
        self.step.unpacked = True
        return super().value()


class CastAgain(Stays):
    """A copy of a parameter in another precision, as autocast makes them, which is made again from the parameter."""

    __slots__ = ("dtype", "view")

    def __init__(self, tensor: Tensor, parameter: Tensor, step: Step) -> None:
        super().__init__(parameter, step)
        self.dtype, self.view = (
            tensor.dtype,
            (tensor.shape, tensor.stride(), tensor.storage_offset()),
        )

    def value(self) -> Tensor:
        return super().value().to(self.dtype).as_strided(*self.view)


def _witness(tensor: Tensor) -> Tensor:
    """A tensor that shares the version and not the storage, for autograd's check of changes in place."""
    witness = tensor.detach()
    witness.data = ONE_ELEMENT.expand(tensor.shape)
    return witness
