"""Probe layers once per step, under recompute, accumulation and several ranks too.

Proof: `python -m pytest tests/primitives/test_grad_flow_layers.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.blocks import Globs, blocks_if_any, find_modules, match_names

# Selection of the layers that grad-flow probes, and assignment of parameters to them.

# Maximum number of layers by default. If there were more, modules inside of blocks are not probed.
MOST_LAYERS = 400
# Python modules of torch and Hugging Face that contain only activations such as ReLU.
ACTIVATION_MODULES = ("activation", "activations")


@dataclass(frozen=True, eq=False)
class Layer:
    """A probed module and the names of its parameters, as keys in order."""

    name: str  # qualified name in the model
    module: nn.Module
    is_block: bool  # one of the model's repeated blocks
    # Trainable ones; a shared one counts for one layer only.
    parameters: dict[str, None] = field(default_factory=dict)
    tied: dict[str, None] = field(default_factory=dict)  # those that count for an earlier layer
    frozen: dict[str, None] = field(default_factory=dict)  # those that require no gradient


def choose_layers(
    model: nn.Module,
    layers: Globs | None = None,
    *,
    blocks: Globs | None = None,
) -> list[Layer]:
    """Return the layers to probe: those that match the globs over module names, or a default.

    The default is the blocks, the modules that own parameters, and activations, which own none but
    can be dead. If that is more than `MOST_LAYERS`, modules inside of blocks are left out.
    """
    named = {name: module for name, module in model.named_modules() if name}
    block_names = tuple(blocks_if_any(model, blocks))
    if layers is None:
        chosen = [name for name in named if name in block_names or _is_layer(named[name])]
        if len(chosen) > MOST_LAYERS:
            inside = tuple(f"{name}." for name in block_names)
            chosen = [name for name in chosen if not name.startswith(inside)]
    else:
        chosen = match_names(list(named), layers, option="layers")
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no module with parameters to probe: "
            "name modules with layers="
        )
    found = [Layer(name, named[name], name in block_names) for name in chosen]

    # A parameter belongs to the layers around the first of its names that is in a layer.
    first_names: dict[nn.Parameter, str] = {}
    homes: dict[nn.Parameter, list[Layer]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(parameter, name)
        around = [layer for layer in found if name.startswith(f"{layer.name}.")]
        home = homes.get(parameter) or around
        homes[parameter] = home
        for layer in around:
            if not parameter.requires_grad:
                layer.frozen[name] = None
            elif layer in home:
                layer.parameters[first_name] = None
            else:
                layer.tied[first_name] = None
    return found


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module owns parameters, or is an activation."""
    if next(module.parameters(recurse=False), None) is not None:
        return True
    is_leaf = next(module.children(), None) is None
    return is_leaf and type(module).__module__.rpartition(".")[2] in ACTIVATION_MODULES


# The ranks among which a tensor or a batch is divided.


def dense(tensor: Tensor) -> Tensor:
    """Return this rank's local part of a DTensor, or the tensor itself."""
    placed: Any = tensor
    return placed.to_local() if is_divided(tensor) else tensor


def is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class."""
    return hasattr(tensor, "placements")


def group_of_batch(model: nn.Module) -> Any:
    """Return the process group among which the batch is divided, or None.

    That is DDP's group, or FSDP2's if its mesh has one dimension.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    if not find_modules(model, torch.distributed.fsdp.FSDPModule):
        return None
    parameters: Iterable[Any] = model.parameters()
    meshes = {parameter.device_mesh for parameter in parameters if is_divided(parameter)}
    if len(meshes) != 1:
        return None
    mesh = meshes.pop()
    return mesh.get_group() if mesh.ndim == 1 else None


# Counts of zero and nonfinite elements and sums of squares, on a tensor's own device.


@dataclass(frozen=True, slots=True)
class ValueSpread:
    """Counts of a tensor's elements and the sum of their squares."""

    elements: int  # at least 1
    zeros: int  # elements that are exactly 0
    nonfinite: int  # elements that are inf or nan
    squares: float  # the sum of squares

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def rms(self) -> float:
        """Return the root mean square, which is comparable between layers of different size."""
        return math.sqrt(self.squares / self.elements)

    @property
    def zero(self) -> float:
        """Return the fraction of elements that are exactly 0."""
        return self.zeros / self.elements

    @property
    def bad(self) -> float:
        """Return the fraction of elements that are inf or nan."""
        return self.nonfinite / self.elements


# The fields of a `ValueSpread`, of which the table has sums.
NUM_SUMS = 4
# Places of sums in a row. A layer has those of its outputs; a parameter has those of its gradient,
# of the gradient that the optimizer gets, of its values before the step, and of their change.
OUTPUTS, GRADIENT, AT_STEP, WEIGHTS, CHANGE = range(5)
# Elements per piece on the CPU: small enough for its caches.
CPU_PIECE_ELEMENTS = 2**16
# Elements per piece elsewhere: enough to keep a device busy, with 32 MiB of temporaries.
DEVICE_PIECE_ELEMENTS = 2**22


class Sums:
    """A table of sums on the model's device, for each name; adding to it waits for none."""

    def __init__(self, names: Iterable[str], model: nn.Module) -> None:
        self.place = {name: index for index, name in enumerate(names)}
        # Where parts of the model are on the CPU, the device of the others.
        others = (one.device for one in model.parameters() if one.device.type != "cpu")
        device = next(others, torch.device("cpu"))
        # Made now, so that the bytes that a step holds do not grow.
        shape = len(self.place), CHANGE + 1, NUM_SUMS
        self.table = torch.zeros(shape, dtype=exact_on(device), device=device)

    def of(self, name: str, kind: int) -> Tensor:
        return self.table[self.place[name], kind]

    def over_ranks(
        self, layers: Iterable[str], batch_group: Any, parameters: Mapping[str, Any]
    ) -> Callable[[Iterable[str]], list[ValueSpread | None]]:
        """Return a function that adds up the sums of several names, by their kind.

        A kind without elements has None. Each rank has to call this. The layers' sums are those of
        all ranks that share a batch, and the parameters' those of all among which they are sharded.
        This waits for the device.
        """
        names_by_group: dict[Any, list[str]] = {}
        if batch_group is not None:
            names_by_group[batch_group] = list(layers)
        for name, parameter in parameters.items():
            # Only a DTensor has placements.
            for index, placement in enumerate(getattr(parameter, "placements", ())):
                if placement.is_shard():
                    group = parameter.device_mesh.get_group(index)
                    names_by_group.setdefault(group, []).append(name)
        for group, names in names_by_group.items():
            places = [self.place[name] for name in names]
            reduced = self.table[places]
            dist.all_reduce(reduced, group=group)
            self.table[places] = reduced
        table = self.table.cpu()
        return lambda names: [
            ValueSpread(int(elements), int(zeros), int(bad), squares) if elements else None
            for elements, zeros, bad, squares in table[[self.place[name] for name in names]]
            .sum(0)
            .tolist()
        ]


def exact_on(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device; Apple's lack float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def sums_of(tensor: Tensor) -> Tensor:
    """Return the sums of a `ValueSpread` over a tensor; a complex number counts as two."""
    tensor = dense(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_nested:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        tensor = tensor.flatten()
    on_cpu = tensor.device.type == "cpu"
    most = CPU_PIECE_ELEMENTS if on_cpu else DEVICE_PIECE_ELEMENTS
    dtype = exact_on(tensor.device)
    sums = torch.zeros(NUM_SUMS, dtype=dtype, device=tensor.device)
    elements, zeros, bad, squares = sums
    elements += tensor.numel()
    zeros += tensor.numel()
    # In pieces, because their copies in float64 would take more memory than the tensor.
    for piece in tensor.split(max(1, most * len(tensor) // max(1, tensor.numel()))):
        values = piece.to(dtype).flatten()
        piece_squares = torch.dot(values, values)
        zeros -= torch.count_nonzero(values)
        squares += piece_squares
        # Reading a number costs nothing on the CPU, and waits for any other device.
        if not (on_cpu and math.isfinite(piece_squares.item())):
            # inf - inf and nan - nan are nan, which counts as nonzero.
            bad += torch.count_nonzero(values - values)
    return sums


def in_backward() -> bool:
    """Return whether this thread runs backward, where checkpointing reruns forwards."""
    return torch._C._current_graph_task_id() != -1


# Hooks on modules, and modules that may run none.


@dataclass(eq=False)
class ProbeHook:
    """A hook for one module; in copies and pickles of the module it is one for none."""

    module: nn.Module | None
    call: Callable[..., None]

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if module is self.module:
            self.call(*arguments)

    def __reduce__(self) -> Any:
        return ProbeHook, (None, None)


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose hooks may never run, because they are inside compiled code."""
    modules: list[Any] = list(model.modules())
    roots = [module for module in modules if module._compiled_call_impl is not None]
    roots += [module._orig_mod for module in modules if hasattr(module, "_orig_mod")]
    return {module for root in roots for module in root.modules()}
