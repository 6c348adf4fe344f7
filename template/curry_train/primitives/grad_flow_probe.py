"""Probe layers once per step, under recompute, accumulation and several ranks too.

Proof: `python -m pytest tests/gates tests/primitives`.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.utils import _python_dispatch as dispatch
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from ..core.blocks import NoBlocks, find_blocks, match_names, tensors_in

# Selection of the layers that grad-flow probes, and assignment of parameters to them.

# Maximum number of layers by default. If there were more, modules inside of blocks are not probed.
MOST_LAYERS = 400
# Python modules of torch and Hugging Face that contain only activations such as ReLU.
ACTIVATION_MODULES = ("activation", "activations")


@dataclass(frozen=True)
class Layer:
    """A probed module and the names of its parameters."""

    name: str  # qualified name in the model
    module: nn.Module
    is_block: bool  # one of the model's repeated blocks
    parameters: tuple[str, ...]  # trainable ones; a shared one counts for one layer only
    tied: tuple[str, ...]  # trainable parameters that count for an earlier layer
    frozen: tuple[str, ...]  # parameters that require no gradient


def choose_layers(
    model: nn.Module,
    layers: str | Sequence[str] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
) -> list[Layer]:
    """Return the layers to probe: those that match the globs over module names, or a default.

    The default is the blocks, the modules that own parameters, and activations, which own none but
    can be dead. If that is more than `MOST_LAYERS`, modules inside of blocks are left out.
    """
    named = {name: module for name, module in model.named_modules() if name}
    try:
        block_names = list(find_blocks(model, blocks))
    except NoBlocks:
        block_names = []

    if layers is None:
        chosen = {
            name
            for name, module in named.items()
            if name in block_names or _owns(module) or _is_activation(module)
        }
        if len(chosen) > MOST_LAYERS:
            chosen = {
                name for name in chosen if name in block_names or not _inside(name, block_names)
            }
    else:
        globs = [layers] if isinstance(layers, str) else layers
        chosen = {
            name for glob in globs for name in match_names(list(named), glob, option="layers")
        }

    names = [name for name in named if name in chosen]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no module with parameters to probe: "
            "name modules with layers="
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no shape yet: run one batch through the model first")
    return _with_parameters(model, names, block_names, named)


def _with_parameters(
    model: nn.Module, names: list[str], blocks: list[str], named: dict[str, nn.Module]
) -> list[Layer]:
    """Assign each parameter to the layers around the first of its names that is in a layer."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(alias)

    counted: dict[str, list[str]] = {name: [] for name in names}
    tied = copy.deepcopy(counted)
    frozen = copy.deepcopy(counted)
    for parameter, parameter_names in aliases.items():
        around: dict[str, list[str]] = {}
        for alias in parameter_names:
            around[alias] = [name for name in _parents(alias) if name in counted]
        home = next((alias for alias in parameter_names if around[alias]), None)
        for alias in parameter_names:
            for name in around[alias]:
                if not parameter.requires_grad:
                    frozen[name].append(alias)
                elif home is not None and name in around[home]:
                    counted[name].append(parameter_names[0])
                else:
                    tied[name].append(home or alias)

    return [
        Layer(
            name,
            named[name],
            is_block=name in blocks,
            parameters=tuple(dict.fromkeys(counted[name])),
            tied=tuple(dict.fromkeys(tied[name])),
            frozen=tuple(dict.fromkeys(frozen[name])),
        )
        for name in names
    ]


def _parents(name: str) -> list[str]:
    """Return the qualified names of all modules around a parameter, outermost first."""
    segments = name.split(".")
    return [".".join(segments[:end]) for end in range(1, len(segments))]


def _inside(name: str, modules: Sequence[str]) -> bool:
    """Return whether a name lies below one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_activation(module: nn.Module) -> bool:
    is_leaf = next(module.children(), None) is None
    return is_leaf and type(module).__module__.rpartition(".")[2] in ACTIVATION_MODULES


# Sums over the ranks among which a tensor or a batch is divided.


def dense(tensor: Tensor) -> Tensor:
    """Return this rank's local part of a DTensor, or the tensor itself."""
    placed: Any = tensor
    return placed.to_local() if is_divided(tensor) else tensor


def is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def groups_of(tensor: Tensor) -> list[Any]:
    """Return the process groups among which a tensor is sharded; none if plain or replicated."""
    if not is_divided(tensor):
        return []
    placed: Any = tensor
    for placement in placed.placements:
        if placement.is_partial():
            raise ValueError(
                f"a gradient with placements {placed.placements} is a partial sum: reduce it first"
            )
    return [
        placed.device_mesh.get_group(index)
        for index, kind in enumerate(placed.placements)
        if kind.is_shard()
    ]


def add_over_ranks(sums: Tensor, groups: Sequence[Sequence[Any]]) -> None:
    """Sum each row over the groups of its tensor, with one all-reduce per group.

    Every rank has to call this.
    """
    distinct = {id(group): group for row_groups in groups for group in row_groups}
    for group_id, group in distinct.items():
        rows = [index for index, row_groups in enumerate(groups) if group_id in map(id, row_groups)]
        reduced = sums[rows]
        dist.all_reduce(reduced, group=group)
        sums[rows] = reduced


def group_of_batch(model: nn.Module) -> Any:
    """Return the process group among which the batch is divided, or None.

    That is DDP's group, or FSDP2's if its mesh has one dimension.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    fully_sharded = torch.distributed.fsdp.FSDPModule
    if not any(isinstance(module, fully_sharded) for module in model.modules()):
        return None
    divided: list[Any] = [parameter for parameter in model.parameters() if is_divided(parameter)]
    meshes = {parameter.device_mesh for parameter in divided}
    if len(meshes) != 1:
        return None
    mesh = meshes.pop()
    return mesh.get_group() if mesh.ndim == 1 else None


def inner_of(model: nn.Module) -> nn.Module:
    """Return the user's model inside DistributedDataParallel and `torch.compile` wrappers."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside


# Counts of zero and nonfinite elements and sums of squares, on a tensor's own device.

SUM_NAMES = ("elements", "zeros", "nonfinite", "squares")
# Elements per piece on the CPU: small enough for its caches.
CPU_PIECE_ELEMENTS = 2**16
# Elements per piece elsewhere: enough to keep a device busy, with 32 MiB of temporaries.
DEVICE_PIECE_ELEMENTS = 2**22


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, or float32 on Apple's devices, which lack float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def empty_sums(num_rows: int, device: torch.device) -> Tensor:
    return torch.zeros(num_rows, len(SUM_NAMES), dtype=wide(device), device=device)


def _numbers(tensor: Tensor) -> Tensor:
    """Return the stored real numbers of this rank's part of a tensor."""
    tensor = dense(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sums_of(tensor: Tensor) -> Tensor:
    """Return the four `SUM_NAMES` of a tensor's elements; a complex number counts as two."""
    tensor = _numbers(tensor)
    on_cpu = tensor.device.type == "cpu"
    sums = empty_sums(1, tensor.device)[0]
    elements, zeros, bad, squares = sums
    elements += tensor.numel()
    zeros += tensor.numel()
    for piece in _pieces(tensor, CPU_PIECE_ELEMENTS if on_cpu else DEVICE_PIECE_ELEMENTS):
        values = piece.to(sums.dtype).flatten()
        piece_squares = torch.dot(values, values)
        zeros -= torch.count_nonzero(values)
        squares += piece_squares
        # Reading a number costs nothing on the CPU, and waits for any other device.
        if not (on_cpu and math.isfinite(piece_squares.item())):
            # inf - inf and nan - nan are nan, which counts as nonzero.
            bad += torch.count_nonzero(values - values)
    return sums


def _pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yield views of at most `most` elements, so that no strided tensor is copied as a whole."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    longest = max(range(tensor.dim()), key=tensor.size)
    size = max(1, tensor.size(longest) * most // tensor.numel())
    for piece in tensor.split(size, longest):
        yield from _pieces(piece, most)


# Detection of backward, recomputed forwards and selective checkpointing.

SELECTIVE_CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def in_backward() -> bool:
    """Return whether this thread runs backward, where checkpointing reruns forwards."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Return whether a `torch.func` transform runs; its tensors must not escape from it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run `call` at the end of the current backward, after callbacks that others queue.

    By then gradients have been summed over ranks and sharded.
    """
    engine: Any = Variable._execution_engine
    # A callback queued by a callback runs after all that were queued during backward.
    engine.queue_callback(lambda: engine.queue_callback(call))


@contextlib.contextmanager
def outside_selective_checkpoints() -> Iterator[None]:
    """Suspend selective checkpointing, so that it neither caches nor replays operations.

    Other dispatch modes, such as those that measure or fake, stay active.
    """
    modes = dispatch._get_current_dispatch_mode_stack()
    if not any(isinstance(mode, SELECTIVE_CHECKPOINT_MODES) for mode in modes):
        yield
        return

    others = [mode for mode in modes if not isinstance(mode, SELECTIVE_CHECKPOINT_MODES)]
    _replace(modes, others)
    try:
        yield
    finally:
        _replace(others, modes)


def _replace(modes: list[Any], others: list[Any]) -> None:
    """Replace all active dispatch modes by others."""
    for _ in modes:
        dispatch._pop_mode()
    for mode in others:
        dispatch._push_mode(mode)


# Statistics of each layer's outputs, from hooks attached during probed steps only.


class ProbeHook:
    """A hook for one module, inactive in copies of the module and absent from its pickles."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self.module = module
        self.call = call

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if module is self.module:
            self.call(*arguments)

    def __deepcopy__(self, memo: Any) -> "ProbeHook":
        return self

    def __reduce__(self) -> Any:
        return functools.partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    """Replace a hook in a pickled module."""


class Activations:
    """Hooks on a model and its layers, which add up statistics of activations.

    Memory for the sums is allocated at the start, so that held bytes do not grow in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        before_forward: Callable[[], None],
        after_backward: Callable[[], None],
    ) -> None:
        self._model = model
        self._layers = layers
        self._before_forward = before_forward
        self._after_backward = after_backward
        self._handles: list[Any] = []
        self._sums: dict[torch.device, Tensor] = {}
        for device in {parameter.device for parameter in model.parameters()}:
            self._sums[device] = empty_sums(len(layers), device)
        self.start()

    def start(self) -> None:
        """Reset all counts and sums."""
        self.calls = [0] * len(self._layers)
        self.order: dict[int, None] = {}
        self.num_forwards = 0
        # For each running forward of the model, innermost last: whether it is a training forward.
        self._training: list[bool] = []
        self._waiting = False
        for sums in self._sums.values():
            sums.zero_()

    def attach(self) -> None:
        add = self._handles.append
        add(self._model.register_forward_pre_hook(ProbeHook(self._model, self._enter)))
        # Also if forward raises, so that later calls are not attributed to it.
        add(
            self._model.register_forward_hook(ProbeHook(self._model, self._leave), always_call=True)
        )
        compiled = compiled_modules(self._model)
        for index, layer in enumerate(self._layers):
            if layer.module not in compiled:
                hook = ProbeHook(layer.module, functools.partial(self._add, index))
                add(layer.module.register_forward_hook(hook))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def tables(self) -> list[Tensor]:
        """Return one table of sums per device, with one row per layer."""
        return list(self._sums.values())

    def _enter(self, arguments: Any) -> None:
        training = torch.is_grad_enabled() and not (in_backward() or in_transform())
        if training:
            self._before_forward()
        self._training.append(training)
        self.num_forwards += training

    def _leave(self, arguments: Any, output: Any) -> None:
        if self._training and self._training.pop():
            self._listen(output)

    def _listen(self, output: Any) -> None:
        """Hook these tensors to detect the start of their backward.

        Hooks on parameters would not work, since FSDP2 replaces them during forward.
        """
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_came)

    def _gradient_came(self, gradient: Tensor) -> None:
        if not self._waiting:
            self._waiting = True
            at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._waiting = False
        self._after_backward()

    def _counts(self) -> bool:
        """Return whether a layer's call counts as part of a training forward.

        Inside the model's forward, the grad mode at its start decides, because reentrant
        checkpointing turns grad mode off for its first forward.
        """
        if in_backward() or torch.compiler.is_compiling() or in_transform():
            return False
        return self._training[-1] if self._training else torch.is_grad_enabled()

    def _add(self, index: int, arguments: Any, output: Any) -> None:
        if not self._counts():
            return
        if not self._training:
            # The training loop calls parts of the model directly, so `_leave` does not run.
            self._listen(output)
        outputs = {id(tensor): tensor for tensor in tensors_in(output) if countable(tensor)}
        if not outputs:
            return

        self.calls[index] += 1
        self.order.setdefault(index)
        with torch.no_grad(), outside_selective_checkpoints():
            for tensor in outputs.values():
                if tensor.device not in self._sums:
                    self._sums[tensor.device] = empty_sums(len(self._layers), tensor.device)
                self._sums[tensor.device][index].add_(sums_of(tensor))


def countable(tensor: Tensor) -> bool:
    """Return whether a tensor is floating-point or complex, and has values."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose hooks may never run, because they are inside compiled code."""
    roots = [module for module in model.modules() if module._compiled_call_impl is not None]
    originals = [getattr(module, "_orig_mod", None) for module in model.modules()]
    roots += [module for module in originals if isinstance(module, nn.Module)]
    return {module for root in roots for module in root.modules()}


# Statistics of gradients and of the optimizer's updates, for each parameter once.

SQUARES_COLUMN = SUM_NAMES.index("squares")


class ParameterSums:
    """Sums for the trainable parameters, by name.

    `read` may be called after each backward; the last call counts.
    """

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.names = list(named)
        self._parameters = list(named.values())
        self._index = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._gradients = self._rows(len(SUM_NAMES))
        # Sums of squares of the weights, and of their change in a step.
        self._moves = self._rows(2)
        # Sum of squares of the gradients that the optimizer gets.
        self._at_step = self._rows(1)
        self._groups = [groups_of(parameter) for parameter in self._parameters]
        self._kept: dict[int, Tensor] = {}
        self.start()

    def _rows(self, columns: int) -> dict[torch.device, Tensor]:
        devices = {parameter.device for parameter in self._parameters}
        return {
            device: empty_sums(len(self._parameters), device)[:, :columns].clone()
            for device in devices
        }

    def start(self) -> None:
        """Reset all sums."""
        self.has_gradient: list[bool] | None = None
        self.moved = [False] * len(self._parameters)
        # Whether an optimizer has stepped with a gradient of the parameter.
        self.met = [False] * len(self._parameters)
        self._kept.clear()
        for table in (self._gradients, self._moves, self._at_step):
            for rows in table.values():
                rows.zero_()

    def that_have(self) -> list[bool]:
        """Return for each parameter whether it has a gradient now."""
        return [parameter.grad is not None for parameter in self._parameters]

    def were_read(self) -> bool:
        """Return whether the same parameters have gradients as at the last `read`."""
        return self.has_gradient == self.that_have()

    def are_gone(self) -> bool:
        """Return whether the last `read` found gradients and there are none now."""
        return any(self.has_gradient or ()) and not any(self.that_have())

    @torch.no_grad()
    def read(self, scale: Tensor | None = None) -> None:
        """Sum up the current gradients; `scale` is the loss scale, which is divided out."""
        self.has_gradient = self.that_have()
        for index, parameter in enumerate(self._parameters):
            row = self._gradients[parameter.device][index]
            row.zero_()
            if parameter.grad is not None:
                sums = sums_of(parameter.grad)
                row.add_(sums.to(row.device))
                row[SQUARES_COLUMN].div_(_squared(scale, row))

    @torch.no_grad()
    def before_step(
        self, optimizer: torch.optim.Optimizer, *, updates: bool, scale: Tensor | None = None
    ) -> None:
        """Sum up the gradients that an optimizer gets; with `updates`, copy its weights."""
        for index in self._of(optimizer):
            parameter = self._parameters[index]
            if parameter.grad is not None:
                row = self._at_step[parameter.device][index]
                self.met[index] = True
                squares = sums_of(parameter.grad)[SQUARES_COLUMN]
                row.copy_(squares.to(row.device) / _squared(scale, row))
            if updates:
                self._kept[index] = dense(parameter.detach()).clone()

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum up the change of the weights, and free their copies."""
        for index in self._of(optimizer):
            before = self._kept.pop(index, None)
            if before is not None:
                parameter = self._parameters[index]
                after = dense(parameter.detach())
                row = self._moves[parameter.device][index]
                # The difference of two near numbers is exact in their own precision.
                row[0].copy_(sums_of(before)[SQUARES_COLUMN])
                row[1].copy_(sums_of(after - before)[SQUARES_COLUMN])
                self.moved[index] = True

    def _of(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the indices of the parameters that an optimizer holds."""
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [self._index[member] for member in dict.fromkeys(members) if member in self._index]

    def tables(self) -> list[Tensor]:
        """Return one table per device, with one row per parameter.

        Columns are the sums, the moves, and the squares at the optimizer's step. Rows of sharded
        parameters are summed over ranks, so every rank has to call this.
        """
        tables = []
        for device, gradients in self._gradients.items():
            table = torch.cat([gradients, self._moves[device], self._at_step[device]], 1)
            groups = [
                parameter_groups if parameter.device == device else []
                for parameter, parameter_groups in zip(self._parameters, self._groups, strict=True)
            ]
            add_over_ranks(table, groups)
            tables.append(table)
        return tables


def _squared(scale: Tensor | None, row: Tensor) -> Tensor:
    """Return the square of the loss scale as a scalar like the elements of `row`, 1 for None."""
    if scale is None:
        return torch.ones_like(row[0])
    return scale.detach().to(row).square().reshape(())
