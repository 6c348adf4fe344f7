"""Which ways to run a block are worth measuring, and which blocks cost the same, so that one of a kind is measured.

Which calls a selective policy might keep is read off one forward; those sets that no other one beats on paper are then
measured. Proof: `python -m pytest tests/test_menu.py`.
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

SIZES = (2, 4)  # microbatches that are measured
Menu = tuple[tuple[Option, tuple[Measured, ...]], ...]
Named = tuple[
    tuple[str, int], int, int
]  # family and place of an expensive call, its bytes and its FLOPs
MOST_SETS = 12  # policies that are measured for each kind of block
MOST_CALLS = 10  # up to so many every set of them is looked at, beyond only those that keep the dearest first


class Operations(TorchDispatchMode):
    """What each block computes, because two of one class and with equal shapes may do so differently."""

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
    """The blocks that are called, by kind, with the inputs of their first call."""
    module, batch = sketch.build(), sketch.batch(batch_size)
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
    together: dict[Any, list[str]] = {}
    for name, block in blocks.items():
        figures = step.blocks[name]
        shapes = _shapes(dict(block.named_parameters())), _shapes(inputs[name])
        key = type(block), shapes, figures.held, figures.calls, record.made[name]
        together.setdefault(repr(key), []).append(name)
    return [
        BlockKind(blocks[names[0]], *inputs[names[0]], tuple(names)) for names in together.values()
    ]


def candidates(kind: BlockKind, *, offload: bool, also: Collection[str] = ()) -> list[Option]:
    """Options worth measuring: each that no other one beats on paper, where an output costs its bytes to keep and its
    FLOPs to make again, and the last call is never made again. `also`: names of modules that regions may run again."""
    _, calls = kind.plain
    places: Counter[str] = Counter()
    named: list[Named] = []
    for family, made, flops in calls:
        named.append(((family, places[family]), made, flops))
        places[family] += 1
    if named:
        named[-1] = (named[-1][0], named[-1][1], 0)
    options = [Option(NONE), Option(REGIONS), Option(FULL)] + ([Option(OFFLOAD)] if offload else [])
    if replayed := _replayed(kind, also):
        options.append(Option(REGIONS, also=replayed))
    return options + [Option(SAC, frozenset(keep)) for keep in _unbeaten(named) if keep]


def _replayed(kind: BlockKind, also: Collection[str]) -> tuple[str, ...]:
    """The modules of a block that are in `also`, which has them of every block of the kind or of none."""
    inside = [
        path
        for path, _ in kind.block.named_modules()
        if any(f"{name}.{path}" in also for name in kind.names)
    ]
    for name, path in itertools.product(kind.names, inside):
        if f"{name}.{path}" not in also:
            raise ValueError(
                f"also takes {path} of some blocks and not of {name}, which is like them: name *.{path}"
            )
    return tuple(inside)


def _unbeaten(calls: Sequence[Named]) -> list[tuple[tuple[str, int], ...]]:
    if len(calls) <= MOST_CALLS:
        sets = [
            keep
            for number in range(len(calls) + 1)
            for keep in itertools.combinations(calls, number)
        ]
    else:
        dearest = sorted(calls, key=lambda call: -call[2] / max(1, call[1]))
        sets = [tuple(dearest[:number]) for number in range(len(calls) + 1)]
    total = sum(flops for _, _, flops in calls)
    points = sorted(
        (sum(made for _, made, _ in keep), total - sum(flops for _, _, flops in keep), index)
        for index, keep in enumerate(sets)
    )
    best, least = [], total + 1
    for _, again, index in points:
        if again < least:
            best.append(index)
            least = again
    spread = sorted(
        {round(place) for place in numpy.linspace(0, len(best) - 1, min(MOST_SETS, len(best)))}
    )
    return [tuple(name for name, _, _ in sets[best[place]]) for place in spread]


def measure_menus(
    sketch: Sketch,
    steps: Sequence[StepEstimate],
    *,
    offload: bool,
    without: Sequence[str] = (),
    also: Sequence[str] = (),
    tell: Callable[[str], None] = lambda message: None,
) -> tuple[tuple[tuple[tuple[str, ...], Menu], ...], tuple[str, ...]]:
    """The names and the menu of each kind of block, and what could not be run, with the reason."""
    replayed = match_inside(sketch.blocks(sketch.build()), also, option="also")
    small, large = (find_kinds(sketch, step, size) for step, size in zip(steps, SIZES, strict=True))
    kinds, left_out = [], []
    for kind in large:
        same = next(other for other in small if kind.names[0] in other.names)
        menu: dict[Option, tuple[Measured, ...]] = {}
        for option in candidates(kind, offload=offload, also=replayed):
            if option.kind in without and option.kind not in (NONE, FULL):
                continue
            if option.kind == SAC and Option(FULL) not in menu:
                continue  # it has been said why
            tell(f"measuring {kind.names[0]} with {option}")
            try:
                found = (kind.plain if option.kind == NONE else kind.run(option))[0]
                menu[option] = (
                    (_smaller(found, menu[Option(NONE)], menu[Option(FULL)]), found)
                    if option.kind == SAC
                    else (same.run(option)[0], found)
                )
            except (
                ValueError,
                RuntimeError,
            ) as error:  # the block's own code, which one technique may not suit
                if option.kind == NONE:
                    raise
                left_out.append(
                    f"{kind.names[0]} can't run as {option}: {str(error).splitlines()[0]}"
                )
        kept = [
            (option, found)
            for option, found in menu.items()
            if option.kind not in {*without} - {NONE}
        ]
        kinds.append((kind.names, tuple(kept)))
    return tuple(kinds), tuple(left_out)


def _smaller(found: Measured, plain: tuple[Measured, ...], full: tuple[Measured, ...]) -> Measured:
    """A policy at the smaller size: what does not grow is as much as without one, and in its backward as in a whole
    recompute; that saves half of the measuring."""
    part = SIZES[0] / SIZES[1]
    held = round(found.held * part + plain[0].held - plain[1].held * part)
    transient = round(found.transient * part + full[0].transient - full[1].transient * part)
    return Measured(
        max(0, held), max(0, transient), found.flops * part, found.moved * part, found.again
    )


def _kept(value: Any) -> Any:
    return (
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
    )


def _shapes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shapes(part) for key, part in value.items()}
    return tree_map(_shape, value)


def _shape(value: Any) -> Any:
    return (
        (tuple(value.shape), value.dtype, value.requires_grad)
        if isinstance(value, Tensor)
        else type(value)
    )
