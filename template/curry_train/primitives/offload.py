"""Keep the activations of blocks in host memory between forward and backward.

    offload_blocks(model)    # all blocks but the last
    loss(model, batch).backward()
    print(offload_report(model).table())

Each storage is moved once, however many views of it are saved. Parameters, buffers and small
tensors stay on the device.

Proof: `python -m pytest tests/primitives/test_offload.py tests/primitives/test_host_memory.py
tests/benchmarks/test_cuda_branches.py tests/peers/test_peer_behaviours.py`.
"""

import functools
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from ..core.blocks import (
    CAST_NODE,
    CheckedTensor,
    DerivedForward,
    Globs,
    become,
    find_blocks,
    find_modules,
    loaded_compiler,
    restore,
    tensors_in,
)

# Host memory: available bytes, buffers, copies.

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
    kernel = [1024 * size for size in _read_statistic(system / "proc/meminfo", "MemAvailable")]
    return min([*kernel, *_group_bytes(system)], default=None)


def require_host_memory(needed: int) -> None:
    """Raise if less than `needed` bytes of host memory are available."""
    available = available_host_bytes()
    if available is not None and needed > available:
        raise HostMemoryShort(
            f"offload needs {needed / 2**20:,.2f} MiB more of host memory and "
            f"{max(0, available) / 2**20:,.2f} MiB is available: {HOST_MEMORY_ADVICE}"
        )


def _group_bytes(system: Path) -> Iterator[int]:
    """Yield the bytes left under the limit of each control group above this process.

    File pages that the kernel can drop do not count as used.
    """
    root = system / "sys/fs/cgroup"
    for line in _read_lines(system / "proc/self/cgroup"):
        # Of the second version; in a container only the root group may be visible.
        folder = Path(line[3:].strip("/"))
        groups = [folder, *folder.parents] if line.startswith("0::") else []
        for group in (root / path for path in groups):
            limit = _read_lines(group / "memory.max")
            used = _read_lines(group / "memory.current")
            if used and limit and limit[0] != "max":
                droppable = _read_statistic(group / "memory.stat", "inactive_file")
                yield int(limit[0]) - int(used[0]) + sum(droppable)


def _read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _read_statistic(path: Path, name: str) -> list[int]:
    """Return the number after a name in a file of the kernel, if it is there."""
    return [
        int(line.split()[1]) for line in _read_lines(path) if line.split()[0].strip(":") == name
    ]


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


# Storages offloaded to the host between forward and backward, and their saved tensors.

ONE_ELEMENT = torch.zeros((), device="cpu")


@dataclass
class OffloadReport:
    """Bytes and storages that one step moved, and the tensors that stayed on the device.

    `skipped` maps each reason for staying to the number of tensors and their bytes.
    """

    moved_bytes: int = 0
    brought_back_bytes: int = 0
    num_moved: int = 0
    skipped: dict[str, tuple[int, int]] = field(default_factory=dict)

    def skip(self, tensor: Tensor, reason: str) -> None:
        count, nbytes = self.skipped.get(reason, (0, 0))
        # Sparse tensors do not report their bytes.
        added_bytes = tensor.nbytes if tensor.layout is torch.strided else 0
        self.skipped[reason] = count + 1, nbytes + added_bytes

    def table(self) -> str:
        """Format the report as text of at most 80 columns."""
        rows = {
            f"moved to the host, {self.num_moved:,} storages": self.moved_bytes,
            "brought back": self.brought_back_bytes,
        }
        for reason, (count, nbytes) in self.skipped.items():
            rows[f"not moved, {count:,} tensors: {reason}"] = nbytes
        return "\n".join(f"{nbytes / 2**20:>10,.2f} MiB  {name}" for name, nbytes in rows.items())


class OffloadedForward:
    """Everything that the blocks saved in one forward; freed when the last part of it is."""

    def __init__(self, offloader: "Offloader", owned: frozenset[int]) -> None:
        self.offloader = offloader
        self.owned = owned
        self.report = OffloadReport()
        self.unpacked = False
        # References to what moved, by the storage on the device, while that is there.
        self.moved = WeakIdKeyDictionary()
        self.order: list[weakref.ref[OffloadedTensor]] = []
        self.cursor = 0
        self.ahead_bytes = 0
        self.most_bytes = 0

    def unpack(self, saved: "OffloadedTensor | CheckedTensor") -> Tensor:
        """Return the tensor that backward needs."""
        self.unpacked = True
        return saved.value()

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
                saved.moved.fetch()
            position -= 1
        self.cursor = position


class Moved:
    """One storage on the host, to which it starts to move when this is made."""

    def __init__(self, step: OffloadedForward, tensor: Tensor, base: Tensor) -> None:
        self.step = step
        nbytes = self.nbytes = tensor.untyped_storage().nbytes()
        self.base = weakref.ref(base)
        # It shares the version counter but not the storage: the check for changes in place needs no
        # more.
        witness = tensor.detach()
        witness.data = ONE_ELEMENT.expand(tensor.shape)
        self.witness = CheckedTensor(witness)
        self.flat: Tensor | None = None
        self.done: Any = None
        self.ahead = False
        # The saved tensors that no backward has used.
        self.unused: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()

        offloader = step.offloader
        report = step.report
        report.num_moved += 1
        report.moved_bytes += nbytes
        if report.moved_bytes > offloader.most_moved_bytes:
            require_host_memory(nbytes)
            offloader.most_moved_bytes = report.moved_bytes
        step.most_bytes = max(step.most_bytes, 2 * nbytes)
        step.moved[tensor.untyped_storage()] = weakref.ref(self)
        self.host = host_buffer(nbytes, pinned=tensor.is_cuda)
        elements = tensor.detach().as_strided((nbytes // tensor.itemsize,), (1,), 0)
        self.copies = offloader.copies(tensor.device)
        self.copies.out(elements.view(torch.uint8), self.host, most_bytes=step.most_bytes)

    def fetch(self) -> Tensor:
        """Start copying the storage back to the device; it is ahead until backward takes it."""
        self.flat, self.done = self.copies.back(self.host, self.nbytes)
        self.step.report.brought_back_bytes += self.nbytes
        self.step.ahead_bytes += self.nbytes
        self.ahead = True
        return self.flat

    def ask(self, saved: "OffloadedTensor") -> Tensor:
        """Return the bytes on the device for the backward of one operation."""
        flat = self.flat
        if flat is None:
            flat = self.fetch()
            self.step.cursor = saved.index

        self.copies.wait(self.done)
        self._note_arrival()
        self.unused.discard(saved)
        if not self.unused:
            # Where the graph is kept, the copy does not wait for its next backward.
            self.flat = None
        self.step.fetch_ahead(saved.index)
        return flat

    def __del__(self) -> None:
        """Autograd drops what it saved as soon as backward has used it."""
        if self.ahead and self.done is not None:
            # Nothing has waited for this copy, and it still writes to the memory freed here.
            self.done.synchronize()
        self._note_arrival()

    def _note_arrival(self) -> None:
        if self.ahead:
            self.ahead = False
            self.step.ahead_bytes -= self.nbytes


class OffloadedTensor:
    """One tensor that autograd saved: a view of a storage on the host.

    Backward gets a tensor without grad itself while its owner holds it, as without offload.
    """

    def __init__(self, moved: Moved, tensor: Tensor) -> None:
        self.moved = moved
        moved.unused.add(self)
        self.index = len(moved.step.order)
        moved.step.order.append(weakref.ref(self))
        self.dtype = tensor.dtype
        self.view = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.original = (lambda: None) if tensor.requires_grad else weakref.ref(tensor)

    def value(self) -> Tensor:
        self.moved.witness.value()
        original = self.original()
        if original is not None:
            return original
        return self.moved.ask(self).view(self.dtype).as_strided(*self.view)


class CastAgain(CheckedTensor):
    """A lower-precision copy of a parameter, made by autocast and cast again in backward."""

    def __init__(self, tensor: Tensor, parameter: Tensor) -> None:
        super().__init__(parameter)
        self.dtype = tensor.dtype
        self.view = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def value(self) -> Tensor:
        return super().value().to(self.dtype).as_strided(*self.view)


# Offload activations of blocks to CPU memory and copy them back during backward.

PLAIN_TENSOR_TYPES = (Tensor, nn.Parameter)
# Reasons for leaving a tensor on the device.
PARAMETER_REASON = "parameter or buffer"
WEIGHT_CAST = "cast of a parameter"
DUPLICATE_REASON = "duplicate"
SMALL_REASON = "too small"
SLICE_REASON = "slice of data"
ALIAS_REASON = "alias of what moved"
OTHER_REASON = "no plain tensor of the device"


class Offloaded(DerivedForward):
    """A block whose saved tensors are on the host until backward."""

    def _run_changed(self, run: Any, inputs: Any) -> Any:
        args, kwargs = inputs
        with self._technique.hooks(self, inputs):
            return run(*args, **kwargs)


class OffloadedCall:
    """One call of a block: what it saves is moved, but for the tensors that stay on the device."""

    def __init__(self, step: OffloadedForward, block: nn.Module, inputs: Any) -> None:
        self.step = step
        self.owned = step.owned | _list_addresses(block)
        self.device = next((parameter.device.type for parameter in block.parameters()), None)
        data = [
            leaf
            for leaf in tensors_in(inputs)
            if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.requires_grad
        ]
        # Moving a slice of a tensor that the caller holds, such as a data set on the device, frees
        # nothing.
        self.slices = {_address(leaf) for leaf in data if 2 * leaf.nbytes < _storage(leaf).nbytes()}

    def pack(self, tensor: Tensor) -> OffloadedTensor | CheckedTensor:
        """Return the object that autograd holds in place of a tensor."""
        step = self.step
        base = tensor if tensor._base is None else tensor._base
        reason = self._explain_why_it_stays(tensor, base)
        if reason is None:
            moved = step.moved.get(tensor.untyped_storage(), lambda: None)()
            if moved is None:
                return OffloadedTensor(Moved(step, tensor, base), tensor)
            # Tensors that are not views of each other have separate versions. An LSTM cell writes
            # such chunks of one storage one after the other, so a copy made for the first chunk is
            # out of date for the second.
            if moved.base() is base and moved.witness.version == tensor._version:
                step.report.skip(tensor, DUPLICATE_REASON)
                return OffloadedTensor(moved, tensor)
            reason = ALIAS_REASON

        step.report.skip(tensor, reason)
        if reason == WEIGHT_CAST:
            return CastAgain(tensor, _find_cast_weight(base))
        return CheckedTensor(tensor)

    def _explain_why_it_stays(self, tensor: Tensor, base: Tensor) -> str | None:
        """Return the reason to leave a tensor on the device, or None to move its storage."""
        if (
            type(tensor) not in PLAIN_TENSOR_TYPES
            or tensor.layout is not torch.strided
            or tensor.is_meta
            or tensor._is_zerotensor()  # zeros without storage, of forward-mode derivatives
        ):
            return OTHER_REASON
        if isinstance(base, nn.Parameter) or _address(tensor) in self.owned:
            return PARAMETER_REASON
        size = _storage(tensor).nbytes()
        if (
            # Such as the seed of a kernel, which is on the host.
            self.device not in (None, tensor.device.type)
            or tensor.is_conj()
            or tensor.is_neg()
            or size % tensor.itemsize
        ):
            return OTHER_REASON
        if size < max(1, self.step.offloader.min_bytes):
            return SMALL_REASON
        if _find_cast_weight(base) is not None:
            return WEIGHT_CAST
        return SLICE_REASON if _address(tensor) in self.slices else None


class Offloader:
    """State shared by the offloaded blocks of a model."""

    def __init__(self, model: nn.Module | None, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.model = (lambda: None) if model is None else weakref.ref(model)
        self.copies = functools.cache(HostCopies)
        # The most bytes that a step has moved; the host had room for them.
        self.most_moved_bytes = 0
        self.step: Callable[[], OffloadedForward | None] = lambda: None
        self.report = OffloadReport()

    def __reduce__(self) -> Any:
        return Offloader, (self.model(), self.min_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offloader":
        # The copy of the model, if the whole model is being copied.
        return Offloader(memo.get(id(self.model())), self.min_bytes)

    def hooks(self, block: nn.Module, inputs: Any) -> saved_tensors_hooks:
        step = self.step()
        if step is None or step.unpacked:
            model = self.model()
            # Leave out the block's own tensors: FSDP2 frees them after the block's forward, and
            # their addresses are reused.
            owned = (
                frozenset() if model is None else _list_addresses(model) - _list_addresses(block)
            )
            step = OffloadedForward(self, owned)
            self.step = weakref.ref(step)
            self.report = step.report
        pack = OffloadedCall(step, block, inputs).pack
        # Where a block calls a compiled function, the compiler would trace this hook too.
        if loaded_compiler() is not None:
            pack = torch.compiler.disable(pack)
        return saved_tensors_hooks(pack, step.unpack)


def offload_blocks(
    model: nn.Module,
    *,
    blocks: Globs | None = None,
    min_bytes: int = 4096,
    keep_last: int = 1,
) -> list[str]:
    """Offload the blocks of a model, in place, and return the names of the offloaded ones.

    The last `keep_last` blocks are not offloaded: backward starts with them, so their tensors would
    be copied back at once. A step that needs more memory than the host has raises
    `HostMemoryShort`. Call this before DDP, `fully_shard` and `torch.compile`.
    """
    for name, value in (("min_bytes", min_bytes), ("keep_last", keep_last)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be a whole number from 0 up, got {value!r}")
    if find_modules(model, Offloaded):
        raise ValueError(
            "blocks of this model are offloaded already: call remove_offload(model) first"
        )

    found = find_blocks(model, blocks)
    names = list(found)[: len(found) - keep_last]
    if not names:
        raise ValueError(
            f"keep_last={keep_last} leaves none of the {len(found)} blocks to offload: lower it"
        )

    offloader = Offloader(model, min_bytes)
    for name in names:
        become(Offloaded, found[name], offloader)
    return names


def remove_offload(model: nn.Module) -> list[str]:
    """Undo `offload_blocks` and return the offloaded blocks' names."""
    return restore(model, Offloaded)


def offload_report(model: nn.Module) -> OffloadReport:
    """Report what the last step of a model with offloaded blocks has moved so far."""
    for block in find_modules(model, Offloaded).values():
        report: OffloadReport = block._technique.report
        return report
    raise ValueError("no block of this model is offloaded: call offload_blocks(model) first")


def _list_addresses(module: nn.Module) -> frozenset[int]:
    """Return the storage addresses of a module's parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return frozenset(_address(tensor) for tensor in tensors if type(tensor) in PLAIN_TENSOR_TYPES)


def _address(tensor: Tensor) -> int:
    return _storage(tensor).data_ptr()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    try:
        return tensor.untyped_storage()
    except NotImplementedError as error:
        raise RuntimeError(
            "offloaded blocks can't run inside torch.func: call remove_offload(model) first"
        ) from error


def _find_cast_weight(base: Tensor) -> Any:
    """Return the parameter that a tensor is a cast of, if any."""
    node = base.grad_fn
    if node is None or node.name() != CAST_NODE or base._version:
        return None
    weight: Any = getattr(node.next_functions[0][0], "variable", None)
    if type(weight) not in PLAIN_TENSOR_TYPES or weight.device != base.device:
        return None
    return weight if weight.shape == base.shape and weight.stride() == base.stride() else None
