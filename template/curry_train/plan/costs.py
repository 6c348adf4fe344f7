"""Measure what each option of a block costs in bytes and seconds.

Proof: `python -m pytest tests/plan/test_menu.py`.
"""

import functools
import gc
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only

from ..core.generators import seeded
from ..core.measure import LiveStorages, has_wrapper, operands, tensors_in
from ..primitives import sac
from ..primitives.rerun import TORCH_ATTRIBUTES
from .device import REGIONS_SECONDS, SAC_SECONDS, DeviceProfile
from .estimate import Sketch, StepEstimate
from .record import operation_cost
from .saved import (
    FULL_KIND,
    NONE_KIND,
    OFFLOAD_KIND,
    REGIONS_KIND,
    SAC_KIND,
    Option,
    apply_options,
    remove_options,
)
from .shapes import NEEDS_VALUES_ERRORS

# Costs of one block under each option: held bytes, transient bytes and operations.


@dataclass(frozen=True)
class Measured:
    """Costs of a block under one option."""

    held: Any  # bytes held after forward
    transient: Any  # the most bytes besides the held ones during backward
    flops: Any  # of each operation of forward and backward
    moved: Any  # bytes read and written by each operation
    again: Any  # 1 for operations of forward and recompute, which selective recompute slows down
    moved_away: Any = 0  # bytes that offload moves to the host

    def seconds(self, option: Option, profile: DeviceProfile, dtype: str) -> float:
        """Predict the time of forward and backward.

        Offload copies to the host and back; the copies overlap with the computation.
        """
        extra = {SAC_KIND: SAC_SECONDS, REGIONS_KIND: REGIONS_SECONDS}.get(option.kind, 0.0)
        seconds = profile.work_seconds(
            self.flops, self.moved, dtype=dtype, extra_seconds=extra * self.again
        )
        copies = 2 * self.moved_away / (profile.host_bytes_per_second or math.inf)
        return max(seconds, copies)


class BlockLives(LiveStorages):
    """Record the storages, FLOPs and bytes moved of one block's forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[tuple[int, int, bool]] = []
        self.forward = True
        # Family, bytes of the output and FLOPs of each expensive call of the forward.
        self.calls: list[tuple[str, int, int]] = []

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = super().run(func, args, kwargs)
        flops, moved = operation_cost(func, args, kwargs, out)
        self.costs.append((flops, moved, self.forward or torch.is_grad_enabled()))

        family = sac.family_of(func) if isinstance(func, sac.Operation) else None
        if self.forward and family:
            made = sum(value.untyped_storage().nbytes() for value in operands(out))
            # A call that draws random numbers must not be kept: keeping 0 FLOPs gains nothing.
            drawn = sac.draws(func, args, kwargs)
            self.calls.append((family, 0, 0) if drawn else (family, made, flops))
        return out


def _autocast_now() -> dict[str, Any]:
    """Return the arguments of `torch.autocast` for the context that is active."""
    return {
        "dtype": torch.get_autocast_dtype("cpu"),
        "enabled": torch.is_autocast_enabled("cpu"),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


class FirstAttributes:
    """The plain attributes that the modules of a block have at its first call in the model.

    A block that keeps state between its calls, or is given some before each, runs from them alone.
    """

    def __init__(self, block: nn.Module) -> None:
        # Mapping a tree copies its dictionaries, lists and tuples.
        self._found = [
            (module, tree_map_only(Tensor, _leaf, _plain_attributes(module)))
            for module in block.modules()
        ]

    def hold_graph(self) -> bool:
        """Return whether the attributes now hold tensors of a graph, which one backward frees."""
        now = [_plain_attributes(module) for module, _ in self._found]
        return any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_iter(now))

    def put_back(self) -> None:
        for module, attributes in self._found:
            for name in _plain_attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(tree_map_only(Tensor, _leaf, attributes))


PLAIN_TYPES = (bool, int, float, str, dict, list, tuple, Tensor, type(None))


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds itself, without parameters, buffers, modules and hooks."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in TORCH_ATTRIBUTES and isinstance(value, PLAIN_TYPES)
    }


@dataclass(frozen=True)
class BlockKind:
    """A group of blocks that cost the same, with one of them to measure."""

    block: nn.Module
    args: tuple[Any, ...]  # of the first call of the block
    kwargs: dict[str, Any]
    names: tuple[str, ...]  # of all blocks of the kind
    autocast: dict[str, Any]  # as the model calls the block
    attributes: FirstAttributes | None  # put back before each run

    @functools.cached_property
    def plain(self) -> tuple[Measured, list[tuple[str, int, int]]]:
        """The costs of the block without recompute, and the expensive calls of its forward."""
        return self.run(Option(NONE_KIND))

    def run(self, option: Option) -> tuple[Measured, list[tuple[str, int, int]]]:
        """Run forward and backward of the block under an option, which is removed afterwards.

        Return the costs, and the expensive calls of the forward.
        """
        holder = nn.ModuleList([self.block])
        trained = [p for p in self.block.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = None
        leaves = tree_map_only(Tensor, _leaf, (self.args, self.kwargs))
        if self.attributes is not None:
            self.attributes.put_back()

        try:
            with Drop() as drop:
                apply_options(holder, {"0": option}, offload=drop)
                gc.collect()
                with seeded(0), torch.enable_grad(), BlockLives() as lives:
                    args, kwargs = tree_map_only(Tensor, _passed_on, leaves)
                    with torch.autocast("cpu", **self.autocast):
                        output = holder[0](*args, **kwargs)
                    # Without a reference from here, inputs count only if the block holds them, and
                    # outputs only if the block holds them for its own backward.
                    del args, kwargs
                    outputs = [
                        tensor.clone() for tensor in tensors_in(output) if tensor.requires_grad
                    ]
                    made = {
                        life for tensor in tensors_in(output) for life in lives.lives_of(tensor)
                    }
                    del output
                    beside = sum(tensor.nbytes for tensor in outputs)

                    # An output that stays alive is the input that the next block holds, and is
                    # counted there.
                    passed_on = sum(life.nbytes for life in made if life.died is None)
                    held = lives.bytes_alive - beside - passed_on

                    lives.forward = False
                    lives.bytes_peak = lives.bytes_alive
                    if outputs:
                        torch.autograd.backward(
                            outputs, [torch.empty_like(tensor) for tensor in outputs]
                        )
        finally:
            remove_options(holder)
            for parameter in trained:
                parameter.grad = None

        flops, moved, again = (
            numpy.array(column, dtype=numpy.float64) for column in zip(*lives.costs, strict=True)
        )
        transient = lives.bytes_peak - beside - held
        return Measured(held, transient, flops, moved, again, drop.bytes_away), lives.calls


class Drop:
    """Stand in for `offload_blocks` on tensors without values, until the end of its context.

    Saved tensors are freed until backward.
    """

    def __init__(self) -> None:
        self.bytes_away = 0
        # By address, which a later storage may reuse once the first one is freed.
        self.known: dict[int, weakref.ref[Any]] = {}
        self.changed: list[nn.Module] = []

    def __enter__(self) -> "Drop":
        return self

    def __exit__(self, *raised: Any) -> None:
        for block in self.changed:
            del block.forward

    def __call__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Wrap the forward of the named blocks."""
        for name in names:
            block = model.get_submodule(name)
            block.forward = self._dropping(block)
            self.changed.append(block)

    def _dropping(self, block: nn.Module) -> Callable[..., Any]:
        """Return the block's forward, of whose saved tensors only shape and kind remain.

        A tensor that `offload_blocks` leaves on the device is saved as it is.
        """
        forward = block.forward

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            shape, stride, dtype, device = packed
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

        def run(*args: Any, **kwargs: Any) -> Any:
            # FSDP2 frees the storages of a block's parameters after its forward.
            parameters = {parameter.untyped_storage()._cdata for parameter in block.parameters()}

            def pack(tensor: Tensor) -> Any:
                # As in `offload_blocks`, parameters stay, and so do DTensors with storages below.
                base = tensor if tensor._base is None else tensor._base
                storage = tensor.untyped_storage()
                is_weight = storage._cdata in parameters or isinstance(base, nn.Parameter)
                if is_weight or has_wrapper([type(tensor)]):
                    return tensor
                before = self.known.get(storage._cdata)
                if before is None or before() is None:
                    self.known[storage._cdata] = weakref.ref(storage)
                    self.bytes_away += storage.nbytes()
                return tensor.shape, tensor.stride(), tensor.dtype, tensor.device

            with saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return run


def _passed_on(tensor: Tensor) -> Tensor:
    """Return a tensor as the previous block would pass it: no leaf, which autograd would hold."""
    return tensor.clone() if tensor.requires_grad else tensor


def _leaf(tensor: Tensor) -> Tensor:
    """Detach a tensor from its graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


# Menus of options: group blocks that cost the same, and measure one block of each group.

MEASURED_MICROBATCH_SIZES = (2, 4)  # microbatch sizes that are measured
# Errors of a block that does not run outside of its model.
ERRORS_OF_BLOCKS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
Menu = tuple[tuple[Option, tuple[Measured, ...]], ...]

# Family and index of an expensive call, its bytes and its FLOPs.
Named = tuple[tuple[str, int], int, int]

MOST_SETS = 12  # policies measured for each kind of block

# Up to this many calls, all sets of calls are considered; beyond it, only sets that keep the calls
# with the most FLOPs per byte.
MOST_CALLS = 10


def find_kinds(sketch: Sketch, step: StepEstimate, batch_size: int) -> list[BlockKind]:
    """Group the blocks that are called by kind, with the inputs of their first call.

    A block that did not run this time, as its model skips layers at random, joins the blocks with
    equal parameters.
    """
    module = sketch.build()
    batch = sketch.batch(batch_size)
    blocks = {
        name: block for name, block in sketch.blocks(module).items() if step.blocks[name].calls
    }
    first: dict[str, BlockKind] = {}
    handles = []
    for name, block in blocks.items():

        def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in first:
                args, kwargs = tree_map_only(Tensor, _kept, (args, kwargs))
                attributes = FirstAttributes(module)
                first[name] = BlockKind(module, args, kwargs, (name,), _autocast_now(), attributes)

        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        with seeded(0), torch.enable_grad():
            sketch.case.workload.mean_loss(module, batch)
    finally:
        for handle in handles:
            handle.remove()

    groups: dict[Any, list[str]] = {}
    for name in filter(first.__contains__, blocks):
        kind, figures = first[name], step.blocks[name]
        shapes = (_class_of(blocks[name]), _shapes((kind.args, kind.kwargs)), kind.autocast)
        # Blocks of one class, with equal shapes, may still compute different things.
        key = (shapes, figures.held, figures.calls, figures.work)
        groups.setdefault(repr(key), []).append(name)
    for name in [name for name in blocks if name not in first]:
        own = _class_of(blocks[name])
        alike = [names for names in groups.values() if _class_of(blocks[names[0]]) == own]
        if alike:
            alike[0].append(name)
    return [replace(first[names[0]], names=tuple(names)) for names in groups.values()]


def _class_of(block: nn.Module) -> tuple[type, Any]:
    """Return the class of a block and the shapes of its parameters."""
    return type(block), _shapes(dict(block.named_parameters()))


def candidates(kind: BlockKind, *, offload: bool) -> list[Option]:
    """List the options worth measuring: those that no other option beats on paper.

    On paper, keeping the output of a call costs its bytes, recomputing it costs its FLOPs, and the
    last call is never recomputed.
    """
    _, calls = kind.plain
    places: Counter[str] = Counter()
    named: list[Named] = []
    for family, made, flops in calls:
        named.append(((family, places[family]), made, flops))
        places[family] += 1
    if named:
        last, made, _ = named[-1]
        named[-1] = (last, made, 0)

    options = [Option(NONE_KIND), Option(REGIONS_KIND), Option(FULL_KIND)]
    if offload:
        options.append(Option(OFFLOAD_KIND))
    return options + [Option(SAC_KIND, frozenset(keep)) for keep in _unbeaten(named) if keep]


def _unbeaten(calls: Sequence[Named]) -> list[tuple[tuple[str, int], ...]]:
    """Return the sets of calls that trade bytes kept for FLOPs recomputed best.

    At most `MOST_SETS` of them, evenly spread from the fewest bytes to the most.
    """
    if len(calls) <= MOST_CALLS:
        sets = [
            keep
            for number in range(len(calls) + 1)
            for keep in itertools.combinations(calls, number)
        ]
    else:
        by_value = sorted(calls, key=lambda call: -call[2] / max(1, call[1]))
        sets = [tuple(by_value[:number]) for number in range(len(calls) + 1)]

    def bytes_and_flops(keep: Sequence[Named]) -> tuple[int, int]:
        return sum(made for _, made, _ in keep), -sum(flops for _, _, flops in keep)

    best = []
    beaten = 1
    for keep in sorted(sets, key=bytes_and_flops):
        _, negative_flops = bytes_and_flops(keep)
        if negative_flops < beaten:
            best.append(keep)
            beaten = negative_flops

    spread = numpy.linspace(0, len(best) - 1, min(MOST_SETS, len(best)))
    places = sorted({round(place) for place in spread})
    return [tuple(name for name, _, _ in best[place]) for place in places]


def measure_menus(
    sketch: Sketch,
    steps: Sequence[StepEstimate],
    *,
    offload: bool,
    without: Sequence[str] = (),
    tell: Callable[[str, float], None] = lambda message, done: None,
) -> tuple[dict[str, Menu], tuple[str, ...]]:
    """Measure the menu of each kind of block.

    Return the menus by the blocks' names, and the options that could not run, with the reason.
    """
    small, large = (
        find_kinds(sketch, step, size)
        for step, size in zip(steps, MEASURED_MICROBATCH_SIZES, strict=True)
    )
    menus: dict[str, Menu] = {}
    left_out = []
    for number, kind in enumerate(large):
        same = next((other for other in small if {*kind.names} & {*other.names}), None)
        if same is None:
            left_out.append(
                f"{kind.names[0]} did not run in every measured step, as its model skips layers "
                "at random: it is planned as it is"
            )
            continue
        runnable = _as_it_runs(kind)
        if isinstance(runnable, str):
            left_out.append(runnable)
            continue
        kind = runnable
        same = replace(same, attributes=kind.attributes and same.attributes)
        menu: dict[Option, tuple[Measured, ...]] = {}
        options = candidates(kind, offload=offload)
        for place, option in enumerate(options):
            is_unwanted = option.kind in without and option.kind not in (NONE_KIND, FULL_KIND)
            # Where full recompute failed, the reason is in left_out.
            if is_unwanted or (option.kind == SAC_KIND and Option(FULL_KIND) not in menu):
                continue
            done = (number + place / len(options)) / len(large)
            tell(f"measuring {kind.names[0]} with {option}", done)
            try:
                found, _ = kind.plain if option.kind == NONE_KIND else kind.run(option)
                if option.kind == SAC_KIND:
                    smaller = _smaller(found, menu[Option(NONE_KIND)], menu[Option(FULL_KIND)])
                else:
                    smaller, _ = same.run(option)
                menu[option] = (smaller, found)
            except (ValueError, RuntimeError) as error:
                # Raised by the block's own code, which may not suit every technique.
                if option.kind == NONE_KIND:
                    raise
                left_out.append(
                    f"{kind.names[0]} can't run as {option}: {str(error).splitlines()[0]}"
                )
        if FULL_KIND in without:
            menu.pop(Option(FULL_KIND), None)
        menus |= dict.fromkeys(kind.names, tuple(menu.items()))
    return menus, tuple(left_out)


def _as_it_runs(kind: BlockKind) -> BlockKind | str:
    """Return a kind that runs by itself, or why it does not.

    Attributes are put back only if the block needs it, because most blocks keep a cache there,
    which their first call makes.
    """
    assert kind.attributes is not None
    why = ""
    ways = [kind] if kind.attributes.hold_graph() else [replace(kind, attributes=None), kind]
    for tried in ways:
        try:
            tried.plain  # noqa: B018
        except NEEDS_VALUES_ERRORS:
            raise
        except ERRORS_OF_BLOCKS as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
        else:
            return tried
    return f"{kind.names[0]} does not run by itself ({why:.200}): it is planned as it is"


def _smaller(found: Measured, plain: tuple[Measured, ...], full: tuple[Measured, ...]) -> Measured:
    """Derive the costs of a policy at the smaller size from those at the larger one.

    The part of the held bytes that does not grow with the size is taken from the plain block, and
    that of the transient bytes from full recompute. This halves the number of measurements.
    """
    scale = MEASURED_MICROBATCH_SIZES[0] / MEASURED_MICROBATCH_SIZES[1]
    held = round(found.held * scale + plain[0].held - plain[1].held * scale)
    transient = round(found.transient * scale + full[0].transient - full[1].transient * scale)
    return Measured(
        max(0, held), max(0, transient), found.flops * scale, found.moved * scale, found.again
    )


def _kept(tensor: Tensor) -> Tensor:
    """Copy a tensor out of its graph."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _shapes(value: Any) -> Any:
    """Describe each tensor by shape, dtype and requires_grad, and other values by their type."""
    if isinstance(value, Mapping):
        return {key: _shapes(item) for key, item in value.items()}
    leaves, structure = tree_flatten(value)
    shapes = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else type(leaf)
        for leaf in leaves
    ]
    return shapes, str(structure)
