"""Menus of options: group blocks that cost the same, and measure one block of each group.

The calls that a selective policy could keep are recorded in one forward. Of all sets of calls, only
those that no other set beats on paper are measured.

Proof: `python -m pytest tests/test_menu.py`.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..core.blocks import match_inside
from ..core.untouched import seeded
from .block_costs import BlockKind, Drop, Measured, drop_saved
from .estimate import Sketch, StepEstimate
from .options import FULL, NONE, OFFLOAD, REGIONS, SAC, Option
from .step_lives import ASKS_FOR_DEVICE

__all__ = ["BlockKind", "Drop", "Measured", "candidates", "drop_saved", "find_kinds"]

SIZES = (2, 4)  # microbatch sizes that are measured
Menu = tuple[tuple[Option, tuple[Measured, ...]], ...]

# Family and index of an expensive call, its bytes and its FLOPs.
Named = tuple[tuple[str, int], int, int]

MOST_SETS = 12  # policies measured for each kind of block

# Up to this many calls, all sets of calls are considered; beyond it, only sets that keep the calls
# with the most FLOPs per byte.
MOST_CALLS = 10


class Operations(TorchDispatchMode):
    """Record the operations of each block.

    Two blocks of the same class, with equal shapes, may still compute different things.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block: str | None = None
        self.made: defaultdict[str, list[Any]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_DEVICE:
            return args[0].device
        out = func(*args, **(kwargs or {}))
        if self.block is not None:
            self.made[self.block].append((str(func), _shapes(out)))
        return out


def find_kinds(sketch: Sketch, step: StepEstimate, batch_size: int) -> list[BlockKind]:
    """Group the blocks that are called by kind, with the inputs of their first call."""
    module = sketch.build()
    batch = sketch.batch(batch_size)
    blocks = {
        name: block for name, block in sketch.blocks(module).items() if step.blocks[name].calls
    }
    inputs: dict[str, tuple[Any, Any]] = {}
    record = Operations()
    handles = []
    for name, block in blocks.items():

        def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            inputs.setdefault(name, tree_map(_kept, (args, kwargs)))
            record.block = name

        def leave(*_: Any) -> None:
            record.block = None

        handles += [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave),
        ]
    try:
        with seeded(0), torch.enable_grad(), record:
            sketch.case.workload.mean_loss(module, batch)
    finally:
        for handle in handles:
            handle.remove()

    groups: dict[Any, list[str]] = {}
    for name, block in blocks.items():
        figures = step.blocks[name]
        shapes = (_shapes(dict(block.named_parameters())), _shapes(inputs[name]))
        key = (type(block), shapes, figures.held, figures.calls, record.made[name])
        groups.setdefault(repr(key), []).append(name)
    return [
        BlockKind(blocks[names[0]], *inputs[names[0]], tuple(names)) for names in groups.values()
    ]


def candidates(kind: BlockKind, *, offload: bool, also: Collection[str] = ()) -> list[Option]:
    """List the options worth measuring: those that no other option beats on paper.

    On paper, keeping the output of a call costs its bytes, recomputing it costs its FLOPs, and the
    last call is never recomputed. `also`: names of modules that regions may recompute.
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

    options = [Option(NONE), Option(REGIONS), Option(FULL)]
    if offload:
        options.append(Option(OFFLOAD))
    if replayed := _replayed(kind, also):
        options.append(Option(REGIONS, also=replayed))
    return options + [Option(SAC, frozenset(keep)) for keep in _unbeaten(named) if keep]


def _replayed(kind: BlockKind, also: Collection[str]) -> tuple[str, ...]:
    """Return the modules of a block that `also` names, by their path in the block.

    Raise an error if `also` names a module in some blocks of the kind and not in others.
    """
    paths = []
    for path, _ in kind.block.named_modules():
        if any(f"{name}.{path}" in also for name in kind.names):
            paths.append(path)
    for name, path in itertools.product(kind.names, paths):
        if f"{name}.{path}" not in also:
            raise ValueError(
                f"also names {path} of some blocks and not of {name}, which is the same kind of "
                f"block: name *.{path}"
            )
    return tuple(paths)


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

    total_flops = sum(flops for _, _, flops in calls)
    points = []
    for index, keep in enumerate(sets):
        kept_bytes = sum(made for _, made, _ in keep)
        kept_flops = sum(flops for _, _, flops in keep)
        points.append((kept_bytes, total_flops - kept_flops, index))

    best = []
    least = total_flops + 1
    for _, recomputed, index in sorted(points):
        if recomputed < least:
            best.append(index)
            least = recomputed

    spread = numpy.linspace(0, len(best) - 1, min(MOST_SETS, len(best)))
    places = sorted({round(place) for place in spread})
    return [_names_of_calls(sets[best[place]]) for place in places]


def _names_of_calls(calls: Sequence[Named]) -> tuple[tuple[str, int], ...]:
    return tuple(name for name, _, _ in calls)


def measure_menus(
    sketch: Sketch,
    steps: Sequence[StepEstimate],
    *,
    offload: bool,
    without: Sequence[str] = (),
    also: Sequence[str] = (),
    tell: Callable[[str], None] = lambda message: None,
) -> tuple[tuple[tuple[tuple[str, ...], Menu], ...], tuple[str, ...]]:
    """Measure the menu of each kind of block.

    Return pairs of block names and menu, and the options that could not run, with the reason.
    """
    replayed = match_inside(sketch.blocks(sketch.build()), also, option="also")
    small, large = (find_kinds(sketch, step, size) for step, size in zip(steps, SIZES, strict=True))
    kinds = []
    left_out = []
    for kind in large:
        same = next(other for other in small if kind.names[0] in other.names)
        menu: dict[Option, tuple[Measured, ...]] = {}
        for option in candidates(kind, offload=offload, also=replayed):
            if option.kind in without and option.kind not in (NONE, FULL):
                continue
            if option.kind == SAC and Option(FULL) not in menu:
                continue  # full recompute failed, and the reason is in left_out
            tell(f"measuring {kind.names[0]} with {option}")
            try:
                found, _ = kind.plain if option.kind == NONE else kind.run(option)
                if option.kind == SAC:
                    smaller = _smaller(found, menu[Option(NONE)], menu[Option(FULL)])
                else:
                    smaller, _ = same.run(option)
                menu[option] = (smaller, found)
            except (ValueError, RuntimeError) as error:
                # Raised by the block's own code, which may not suit every technique.
                if option.kind == NONE:
                    raise
                left_out.append(
                    f"{kind.names[0]} can't run as {option}: {str(error).splitlines()[0]}"
                )
        allowed = [
            (option, measured)
            for option, measured in menu.items()
            if option.kind not in {*without} - {NONE}
        ]
        kinds.append((kind.names, tuple(allowed)))
    return tuple(kinds), tuple(left_out)


def _smaller(found: Measured, plain: tuple[Measured, ...], full: tuple[Measured, ...]) -> Measured:
    """Derive the costs of a policy at the smaller size from those at the larger one.

    The part of the held bytes that does not grow with the size is taken from the plain block, and
    that of the transient bytes from full recompute. This halves the number of measurements.
    """
    scale = SIZES[0] / SIZES[1]
    held = round(found.held * scale + plain[0].held - plain[1].held * scale)
    transient = round(found.transient * scale + full[0].transient - full[1].transient * scale)
    return Measured(
        max(0, held), max(0, transient), found.flops * scale, found.moved * scale, found.again
    )


def _kept(value: Any) -> Any:
    """Copy a tensor out of its graph."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _shapes(value: Any) -> Any:
    """Replace each tensor by its shape, dtype and requires_grad, and other values by their type."""
    if isinstance(value, Mapping):
        return {key: _shapes(item) for key, item in value.items()}
    return tree_map(_shape, value)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return type(value)
