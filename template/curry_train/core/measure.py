"""Measure a training step exactly: held and peak bytes, FLOPs, step time and peak memory.

On CPU the bytes are exact and repeatable: every storage that an operation creates is followed until
it is freed. On CUDA they are the allocator's. Each pass runs under one instrument only, because an
instrument keeps tensors alive that another one would count.

Proof: `python -m pytest tests/bench tests/core tests/plan tests/runs`.
"""

import contextlib
import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from .blocks import SCRIPTED, Globs, blocks_if_any
from .blocks import tensors_in as tensors_in
from .generators import generators_kept, seeded

# FLOPs of single operations: torch's formulas, attention and grouped matrix products.


_ATTENTION_KERNELS = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
# Where the query stands among the arguments, and the number of matrix products: forward has two,
# scores and output; backward repeats the scores and has four more.
ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{end}"): facts
    for kernel in _ATTENTION_KERNELS
    for end, facts in {"": (0, 2), "_backward": (1, 5)}.items()
}


def operation_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one call of an operation, 0 if there is no formula for it."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in ATTENTION:
        place, products = ATTENTION[packet]
        return _attention_flops(*args[place : place + 3], products=products)
    # Of mixture-of-experts layers.
    if packet is torch.ops.aten._grouped_mm:
        return _grouped_flops(args[0], args[1])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, products: int) -> int:
    """Return the FLOPs of attention with the given number of matrix products.

    As in torch's formulas, what a causal mask excludes is counted too.
    """
    batch, heads, length, width = query.shape
    mean_width = (width + value.shape[-1]) / 2
    return round(products * 2 * batch * heads * length * key.shape[-2] * mean_width)


def _grouped_flops(a: Tensor, b: Tensor) -> int:
    """Return the FLOPs of a grouped matrix product.

    Groups share the rows, the columns or the summed dimension of an operand that has no dimension
    for them.
    """
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


# Measure a training step on CPU or CUDA: held and peak bytes, FLOPs, seconds.

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Memory:
    """Held and peak bytes of one step, without the parameters, buffers and batch that it needs."""

    # Activation storages alive after forward.
    held_bytes: int

    # The most bytes alive at any moment of forward and backward, gradients included.
    peak_bytes: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products, convolutions and attention; `backward` includes recomputation."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(eq=False)
class Life:
    """One storage, from the operation that made it to the operation that no longer found it."""

    nbytes: int

    # The value of the `owner` function when the storage was made, such as a layer's name.
    owner: Any

    # Number of the operation that made it.
    born: int

    # Number of the first operation that no longer found it; None while it is alive.
    died: int | None = None

    # Whether an operation of another owner has used it.
    used_elsewhere: bool = False

    # Number of the autograd node whose backward made it, if one did.
    node: int | None = None


# Backward of these operations writes into zeros that it made; in a dispatch mode it does not.
_SCATTER_OPERATIONS = {
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter.value,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_add.default,
}


@dataclass
class _Sum:
    """Result of an operation that writes into its first operand when no mode is active."""

    operand: Life
    result: Life
    storage_key: int
    bytes_alive: int  # after the operation, with both


# A weak reference to a storage, and its record.
Known = tuple[Callable[[], Any], Life | None]
UNKNOWN: Known = (lambda: None, None)


class OperationMode(TorchDispatchMode):
    """Mode that passes each operation on plain tensors, with or without values, to `run`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrapper(types):
            # The subclass runs first; the operations on its inner tensors come here again.
            return NotImplemented
        if func is torch.ops.prim.device.default:
            # Tensors without values return their device through the dispatcher, real ones do not.
            return args[0].device
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation; subclasses record it here."""
        return func(*args, **kwargs)


class LiveStorages(OperationMode):
    """Mode that follows every storage made inside it until the storage is freed.

    `owner` is called to get the owner of each new storage. With `device`, only storages on devices
    of that type count.

    Autograd adds gradients in place, and scatters in place, where nothing else holds the operand;
    inside of any dispatch mode it makes a new tensor. Such a result counts as its operand.
    """

    def __init__(
        self, *, owner: Callable[[], Any] = lambda: None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.bytes_alive = 0
        self.bytes_peak = 0
        self.num_operations = 0
        self.lives: list[Life] = []
        # Each storage that was made (True) or freed (False), in order.
        self.events: list[tuple[Life, bool]] = []
        self._owner = owner
        self._device = device
        # A reference to each storage, and its record; None for a storage that was there before.
        self._known: dict[int, Known] = {}
        # A result that may count as its operand, until it is known whether the operand dies.
        self._sum: _Sum | None = None

    def __exit__(self, *raised: Any) -> None:
        self.settle()
        super().__exit__(*raised)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.settle()
        for value in operands(args, kwargs):
            self._meet(value, was_there=True)
        out = func(*args, **kwargs)
        for value in operands(out):
            self._meet(value, was_there=False)
        self._sum = self._find_sum(func, args, out)
        pending_bytes = 0 if self._sum is None else self._sum.result.nbytes
        self.bytes_peak = max(self.bytes_peak, self.bytes_alive - pending_bytes)
        self.num_operations += 1
        return out

    def settle(self) -> None:
        """Count the last result as its operand if the operand is gone, else as a new storage."""
        if self._sum is None:
            return
        pending = self._sum
        self._sum = None
        if pending.operand.died is None:
            self.bytes_peak = max(self.bytes_peak, pending.bytes_alive)
            return
        # The operand, which was freed, lives on as the result.
        events = self.events
        operand, result = pending.operand, pending.result
        del self.lives[_last(self.lives, result)]
        del events[_last(events, (operand, False))]
        del events[_last(events, (result, True))]
        operand.died = result.died
        operand.node = result.node
        if result.died is None:
            reference, _ = self._known[pending.storage_key]
            self._known[pending.storage_key] = reference, operand
        else:
            events[_last(events, (result, False))] = operand, False

    def _find_sum(self, func: Any, args: Any, out: Any) -> _Sum | None:
        """Return the sum that backward computes in place when no mode is active, if it may be."""
        is_sum = func is torch.ops.aten.add.Tensor
        if not (is_sum or func in _SCATTER_OPERATIONS) or torch.is_grad_enabled():
            return None
        node = backward_node()
        if node is None or args[0]._is_view():
            return None
        operand = self._find_life(args[0])
        result = self._find_life(out)
        if operand is None or result is None or operand is result:
            return None
        if operand.nbytes != result.nbytes or result.born != self.num_operations:
            return None

        # A formula of one node makes new sums; what comes from two nodes is added in place.
        made_here = operand.node == result.node
        receivers = [receiver for receiver, _ in node.next_functions]
        if made_here == is_sum and not (is_sum and len({*receivers}) < len(receivers)):
            return None
        return _Sum(operand, result, out.untyped_storage()._cdata, self.bytes_alive)

    def _find_life(self, tensor: Tensor) -> Life | None:
        """Return the record of a dense tensor's storage, if it was made inside the mode."""
        if tensor.layout is not torch.strided:
            return None
        return self._known.get(tensor.untyped_storage()._cdata, UNKNOWN)[1]

    def follow(self, tensor: Tensor, *, owner: Any) -> None:
        """Count a tensor that existed before; a storage already followed keeps its first owner."""
        self._meet(tensor, was_there=False, owner=owner)

    def lives_of(self, tensor: Tensor) -> list[Life]:
        """Return the records of a tensor's storages; empty if they existed before the mode."""
        self.settle()
        known = (self._known.get(storage._cdata, UNKNOWN) for storage in _storages(tensor))
        return [life for reference, life in known if reference() is not None and life is not None]

    def _meet(self, tensor: Tensor, *, was_there: bool, owner: Any = None) -> None:
        if self._device is not None and tensor.device.type != self._device.type:
            return
        for storage in _storages(tensor):
            reference, life = self._known.get(storage._cdata, UNKNOWN)
            if was_there and life is not None and self._owner() != life.owner:
                life.used_elsewhere = True
            if reference() is None:
                counts = not was_there and storage.nbytes() > 0
                made = Life(storage.nbytes(), owner or self._owner(), self.num_operations)
                self._watch(storage, made if counts else None)

    def _watch(self, storage: Any, life: Life | None) -> None:
        key = storage._cdata

        def freed(reference: Any) -> None:
            now = life
            if self._known.get(key, UNKNOWN)[0] is reference:
                # A result that counts as its operand has the operand's record.
                now = self._known.pop(key)[1]
            if now is not None:
                self.bytes_alive -= now.nbytes
                now.died = self.num_operations
                self.events.append((now, False))

        self._known[key] = weakref.ref(storage, freed), life
        if life is not None:
            self.bytes_alive += life.nbytes
            self.lives.append(life)
            self.events.append((life, True))
            if not torch.is_grad_enabled():
                node = backward_node()
                life.node = None if node is None else node._sequence_nr()


def backward_node() -> Any:
    """Return the node that backward computes now, or None."""
    return torch._C._current_autograd_node()


def next_node() -> int:
    """Return the number of the node that autograd makes next in this thread."""
    return torch._C._autograd._get_sequence_nr()


def _last(values: Sequence[Any], wanted: Any) -> int:
    """Return the last index of a value."""
    return len(values) - 1 - next(i for i, value in enumerate(reversed(values)) if value == wanted)


def operands(*values: Any) -> list[Tensor]:
    """List the tensors in arguments or results of an operation: quicker than any tree's."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += operands(*value)
        elif isinstance(value, dict):
            found += operands(*value.values())
    return found


def has_wrapper(types: Iterable[type]) -> bool:
    """Check for tensors made of others, such as quantised ones.

    A mode leaves their operations to them, and meets those that they consist of.
    """
    return any(map(is_traceable_wrapper_subclass_type, types))


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with storages of their own below a DTensor or another wrapper."""
    if not is_traceable_wrapper_subclass_type(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = (getattr(tensor, name) for name in names)
    # A DTensor names its mesh too.
    return [local for one in inner if isinstance(one, Tensor) for local in local_tensors(one)]


def _storages(tensor: Tensor) -> list[Any]:
    """Return the storage of a tensor, or those of a DTensor or a sparse tensor."""
    try:
        return [
            part.untyped_storage() for local in local_tensors(tensor) for part in dense_parts(local)
        ]
    except NotImplementedError:
        # The wrapped tensors of torch.func have none; operations meet those inside of them.
        return []


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the indices and, last, the values of a sparse tensor, or the tensor itself."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


class FlopCount(OperationMode):
    """Mode that adds up the FLOPs of every operation that torch has a formula for.

    Attention has a formula of our own: torch leaves out its CPU kernel, and before 2.13 it refuses
    grouped-query heads.
    """

    flops = 0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.flops += operation_flops(func, args, kwargs, out)
        return out


def measure_memory(module: nn.Module, batch: Any, loss: Loss) -> Memory:
    """Measure the held and peak bytes of one forward and backward."""
    device = _device(module)

    # The seed fixes which layers a step drops, in models that drop layers at random.
    with untouched(module), seeded(0):
        if device.type != "cuda":
            gc.collect()
            with LiveStorages() as storages:
                value = loss(module, batch)
                held = storages.bytes_alive
                value.backward()
                return Memory(held, storages.bytes_peak)

        # The first step allocates the workspaces of the libraries, which stay allocated.
        loss(module, batch).backward()
        module.zero_grad(set_to_none=True)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = requested_bytes(device)
        value = loss(module, batch)
        held = requested_bytes(device) - before
        value.backward()
        torch.cuda.synchronize(device)
        return Memory(held, requested_bytes(device, peak=True) - before)


def requested_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Return the bytes that CUDA's allocator was asked for and has not got back.

    What it has allocated is more: it rounds up to 512 bytes, and a large block may keep up to 1 MiB
    that it can't split off, which depends on the blocks that were free.
    """
    # The allocator of cudaMallocAsync does not count what was asked for.
    is_native = torch.cuda.get_allocator_backend() == "native"
    counted = "requested_bytes" if is_native else "allocated_bytes"
    which = "peak" if peak else "current"
    return int(torch.cuda.memory_stats(device)[f"{counted}.all.{which}"])


def count_flops(module: nn.Module, batch: Any, loss: Loss) -> Flops:
    """Count the FLOPs of one forward and its backward."""
    with untouched(module), seeded(0):
        with FlopCount() as forward:
            value = loss(module, batch)
        with FlopCount() as backward:
            value.backward()
        return Flops(forward.flops, backward.flops)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


# Divide a model into layers, and follow with hooks which layer is running.

# Stands for everything outside the layers: the model's own forward between them, and the loss.
REST_LAYER = "(rest)"


def divide(model: nn.Module, *, blocks: Globs | None = None) -> dict[str, nn.Module]:
    """Divide a model into layers that together cover it, in the model's order.

    The layers are the blocks, and around them the largest modules that hold no block. A model that
    repeats nothing is divided into its children.
    """
    return dict(_wrap_forward("", model, blocks_if_any(model, blocks)))


def _wrap_forward(
    prefix: str, module: nn.Module, blocks: Mapping[str, nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = prefix + name
        # Lists and dictionaries of modules are never called.
        if path not in blocks and (
            isinstance(child, nn.ModuleList | nn.ModuleDict)
            or any(block.startswith(f"{path}.") for block in blocks)
        ):
            yield from _wrap_forward(f"{path}.", child, blocks)
        else:
            yield path, child


class RunningLayers:
    """Context that follows which layer runs: `current` is the innermost one, or `REST_LAYER`.

    `calls` counts the calls of whole layers. If a module inside a layer is called while no layer
    runs, its layer is the current one. So a `Sequential` whose members are called one by one, or a
    block that is recomputed in backward, is still attributed to its layer. A layer that is shared
    belongs to the layer that holds it too, while that one runs.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.current = REST_LAYER
        self.latest = REST_LAYER
        self.calls: Counter[str] = Counter()
        self._own: dict[nn.Module, str] = {}
        self._inside: dict[nn.Module, str] = {}
        self._layers = layers
        for name, layer in layers.items():
            self._own.setdefault(layer, name)
            for member in layer.modules():
                self._inside.setdefault(member, name)
        self._callers: list[tuple[nn.Module, str]] = []
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> "RunningLayers":
        for module in self._inside:
            if not isinstance(module, SCRIPTED):
                self._hooks.enter_context(
                    module.register_forward_pre_hook(self._enter, with_kwargs=True)
                )
                self._hooks.enter_context(
                    module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                )
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()

    @property
    def called(self) -> str:
        """The current layer if it was called itself, and not only a module inside of it."""
        if any(self._own.get(module) == self.current for module, _ in self._callers):
            return self.current
        return REST_LAYER

    def entered(self, layer: str, inputs: Any) -> None:
        """Called when a layer starts to run."""

    def left(self, layer: str, output: Any) -> None:
        """Called when a layer ends."""

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        caller = self.current
        self._callers.append((module, caller))
        own_layer = self._own.get(module)
        # The caller may be a layer that only refers to this one, and does not run itself.
        is_within = own_layer and own_layer != caller == self.called != REST_LAYER
        if is_within and module in self._layers[caller].modules():
            own_layer = None
        if own_layer:
            self.current = own_layer
        elif caller == REST_LAYER:
            self.current = self._inside[module]

        if self.current != caller:
            self.latest = self.current
            self.calls[self.current] += own_layer is not None
            self.entered(self.current, (args, kwargs))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A hook of the user may have raised before this call was entered.
        if not self._callers or self._callers[-1][0] is not module:
            return

        layer = self.current
        _, self.current = self._callers.pop()
        if layer != self.current:
            self.left(layer, output)


class Boundaries(RunningLayers):
    """Record which storages go into and out of each layer, without keeping them alive."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(layers)
        self.storages = LiveStorages(owner=lambda: self.current, device=_device(model))
        self._inputs: dict[str, set[Life]] = defaultdict(set)
        self._outputs: dict[str, set[Life]] = defaultdict(set)
        # Inputs that stay for a layer already.
        self._counted: set[Life] = set()

    def entered(self, layer: str, inputs: Any) -> None:
        self._inputs[layer].update(*map(self.storages.lives_of, tensors_in(inputs)))

    def left(self, layer: str, output: Any) -> None:
        self._outputs[layer].update(*map(self.storages.lives_of, tensors_in(output)))

    def stays(self, layer: str) -> int:
        """Return the bytes that stay held if the layer is recomputed; call it once for each layer.

        These are inputs that are freed without recompute, and the layer's own storages that go
        into it or out of it. Inputs of several layers stay for the first one.
        """
        inputs = self._inputs[layer]
        freed_inputs = {life for life in inputs if life.died is not None} - self._counted
        self._counted |= freed_inputs
        # An output that no other layer uses does not stay.
        both = inputs | {life for life in self._outputs[layer] if life.used_elsewhere}
        own = {life for life in both if life.died is None and life.owner == layer}
        return sum(life.nbytes for life in freed_inputs | own)


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one layer holds for backward."""

    name: str
    class_name: str

    # Storages alive after forward that were made while the layer ran, and no other layer inside it.
    bytes: int

    # Bytes that remain if the layer is recomputed: its inputs, and its outputs still alive. What is
    # an input of several layers counts for the first. All of `bytes` if `calls` is 0, because the
    # layer is never called as a whole.
    boundary_bytes: int

    calls: int

    @property
    def saving_bytes(self) -> int:
        """Bytes that recomputing the layer frees; negative if it would hold more than before."""
        return self.bytes - self.boundary_bytes


def measure_layers(
    model: nn.Module, batch: Any, loss: Loss, layers: Mapping[str, nn.Module]
) -> list[LayerMemory]:
    """Measure what each layer holds after one forward, and in a last row what is in no layer.

    Each storage belongs to the layer that ran when it was made.
    """
    device = _device(model)
    cuda = device.type == "cuda"
    gc.collect()  # garbage that is freed during the run would be subtracted
    before = requested_bytes(device) if cuda else 0

    running = Boundaries(model, layers)
    with seeded(0), torch.enable_grad(), running, running.storages:
        value = loss(model, batch)
        gc.collect()  # what only a reference cycle holds is not held for backward
        held = Counter[str]()
        for life in running.storages.lives:
            held[life.owner] += life.nbytes if life.died is None else 0
        if cuda:
            # The libraries' workspaces belong to no layer.
            held[REST_LAYER] += requested_bytes(device) - before - sum(held.values())
        report = []
        for name, layer in {**layers, REST_LAYER: model}.items():
            calls = running.calls[name]
            stays = running.stays(name) if calls else held[name]
            report.append(LayerMemory(name, type(layer).__name__, held[name], stays, calls))
        # The loss keeps what backward needs alive until the bytes are counted.
        del value
    return report


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore every buffer on exit: its value, and the tensor itself if forward replaced it."""
    before = [
        (owner, name, buffer, None if buffer is None else buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in before:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                owner._buffers[name] = buffer


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Start without gradients; on exit restore buffers and generators and drop the gradients."""
    module.zero_grad(set_to_none=True)
    try:
        with generators_kept(), buffers_kept(module):
            yield
    finally:
        module.zero_grad(set_to_none=True)


@contextlib.contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode into training mode; restore modes and buffers at the end.

    A model in training mode is not changed, so that norms frozen by `eval()` stay frozen.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        with buffers_kept(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


# Recognize errors that mean that the device is out of memory.


def is_out_of_memory(error: BaseException) -> bool:
    """Recognize CUDA's out-of-memory error by type, and that of the CPU allocator by its text."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


# Measure the peak memory of a whole training step, with the tensors that stay through it.

# CUDA's allocator hands out memory in multiples of this many bytes.
ALLOCATION_BLOCK_BYTES = 512


def peak_of_step(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of a step, without those of tensors that are there before it.

    On the CPU the step runs slower than without the measurement.
    """
    if device.type != "cuda":
        with LiveStorages() as storages:
            step()
        return storages.bytes_peak

    # Garbage that is collected during the step would lower the figure.
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - allocated


def bytes_on_device(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of the tensors on the device; a shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    block = ALLOCATION_BLOCK_BYTES if device.type == "cuda" else 1
    rounded = {storage._cdata: -(-storage.nbytes() // block) * block for storage in storages}
    return sum(rounded.values())


@contextlib.contextmanager
def heap_kept() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which every measurement runs first."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
