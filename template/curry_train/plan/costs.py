"""Measure what each option of a block costs in bytes and seconds, in whole steps.

In one step, blocks that cost the same run under one option each, so that few steps are enough.

Proof: `python -m pytest tests/plan/test_menu.py`.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..core.measure import has_wrapper
from .device import REGIONS_SECONDS, SAC_SECONDS, DeviceProfile
from .estimate import StepEstimate
from .saved import FULL_KIND, NONE_KIND, OFFLOAD_KIND, REGIONS_KIND, SAC_KIND, Option

MEASURED_MICROBATCH_SIZES = (2, 4)  # microbatch sizes of whole steps
EXTRA_SECONDS = {SAC_KIND: SAC_SECONDS, REGIONS_KIND: REGIONS_SECONDS}
# Errors that a user's block may raise under an option that it can't run with.
ERRORS_OF_BLOCKS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
MOST_SETS = 12  # policies measured for each kind of block
# Up to this many calls, all sets of calls are considered; beyond it, only sets that keep the calls
# with the most FLOPs per byte.
MOST_CALLS = 10

Bytes = NDArray[numpy.float64]
# Family and index of an expensive call, its bytes and its FLOPs.
Named = tuple[tuple[str, int], int, int]


@dataclass(frozen=True, eq=False)
class OptionCost:
    """Memory and time of a block under an option, compared with the block as it is.

    At each measured size there are two numbers of bytes: those that the block holds after its
    forward, and those that its backward needs on top of what all blocks hold. Both are negative
    where the option needs less.
    """

    small: Bytes
    large: Bytes
    slowdown: float = 1.0  # factor of the time of forward and backward, without copies to the host


Menu = Mapping[Option, OptionCost]
# Estimates the step of a measured size whose blocks run under options.
StepOf = Callable[[int, Mapping[str, Option]], StepEstimate]
Tell = Callable[[str, float], None]


def at_size(microbatch: int, small: Any, large: Any) -> Any:
    """Extrapolate a figure from its values at the measured sizes.

    If the two sizes run different numbers of operations, scale the larger one in proportion.
    """
    first, second = MEASURED_MICROBATCH_SIZES
    if numpy.shape(small) != numpy.shape(large):
        return large * (microbatch / second)
    return small + (large - small) / (second - first) * (microbatch - first)


def work_of(step: StepEstimate, name: str) -> list[Any]:
    """Return the FLOPs, and the bytes read and written, of each operation of a block."""
    operations = step.blocks[name].operations
    return [step.flops[operations], step.moved[operations]]


def drop_saved_tensors(model: nn.Module, names: Sequence[str]) -> None:
    """Stand in for `offload_blocks` on tensors without values: saved ones are freed until backward.

    A tensor that `offload_blocks` leaves on the device is saved as it is.
    """
    for name in names:
        block = model.get_submodule(name)
        block.forward = functools.partial(_run_and_drop, block, block.forward)


def _run_and_drop(
    block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of a block, of whose saved tensors only shape and kind remain."""
    # FSDP2 frees the storages of a block's parameters after its forward.
    parameters = {parameter.untyped_storage()._cdata for parameter in block.parameters()}

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        # As in `offload_blocks`, parameters stay, and so do DTensors with storages below.
        base = tensor if tensor._base is None else tensor._base
        is_weight = tensor.untyped_storage()._cdata in parameters
        if is_weight or isinstance(base, nn.Parameter) or has_wrapper([type(tensor)]):
            return lambda: tensor
        return functools.partial(
            torch.empty_strided,
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )

    with saved_tensors_hooks(pack, lambda make: make()):
        return forward(*args, **kwargs)


# Menus of options, which blocks that cost the same share.


def find_kinds(blocks: Mapping[str, nn.Module], steps: Sequence[StepEstimate]) -> list[list[str]]:
    """Group the blocks that run in all steps and cost the same."""
    groups: defaultdict[Any, list[str]] = defaultdict(list)
    large = steps[-1]
    for name, block in blocks.items():
        if all(step.blocks[name].calls for step in steps):
            # Blocks of one class, with equal shapes, may still compute different things.
            found = large.blocks[name]
            is_forward = numpy.array(found.in_grad_mode) == 1
            flops, moved = (one[is_forward].sum() for one in work_of(large, name))
            work = int(is_forward.sum()), flops, moved
            groups[(_class_of(block), found.held, found.calls, *work)].append(name)
    return [*groups.values()]


def _class_of(block: nn.Module) -> tuple[Any, ...]:
    """Return the class of a block and the shapes of its parameters."""
    return type(block), *(
        (name, tuple(one.shape), one.dtype, one.requires_grad)
        for name, one in block.named_parameters()
    )


def candidates(
    expensive: Sequence[tuple[str, int, int]], *, offload: bool, without: Sequence[str] = ()
) -> list[Option]:
    """List the options worth measuring: those that no other option beats on paper.

    On paper, keeping the output of a call costs its bytes, recomputing it costs its FLOPs, and the
    last call is never recomputed. Full recompute is always measured.
    """
    families = [family for family, _, _ in expensive]
    named: list[Named] = []
    for place, (family, made, flops) in enumerate(expensive):
        is_last = place == len(expensive) - 1
        call = family, families[:place].count(family)
        named.append((call, made, 0 if is_last else flops))

    options = [Option(FULL_KIND), Option(REGIONS_KIND)]
    if offload:
        options.append(Option(OFFLOAD_KIND))
    options += [Option(SAC_KIND, frozenset(keep)) for keep in _unbeaten(named) if keep]
    return [one for one in options if one.kind == FULL_KIND or one.kind not in without]


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
    step_of: StepOf,
    blocks: Mapping[str, nn.Module],
    steps: Sequence[StepEstimate],
    *,
    profile: DeviceProfile,
    offload: bool,
    without: Sequence[str] = (),
    tell: Tell = lambda message, done: None,
) -> tuple[dict[str, Menu], list[str]]:
    """Measure the menu of each kind of block; `steps` are plain ones of the measured sizes.

    Return the menus by the blocks' names, and the options that could not run, with the reason.
    """
    small, large = MEASURED_MICROBATCH_SIZES
    kinds = find_kinds(blocks, steps)
    rounds: defaultdict[int, dict[str, Option]] = defaultdict(dict)
    for names in kinds:
        expensive = steps[-1].blocks[names[0]].expensive
        for place, option in enumerate(candidates(expensive, offload=offload, without=without)):
            turn, index = divmod(place, len(names))
            rounds[turn][names[index]] = option

    left_out: dict[str, str] = {}
    found: defaultdict[str, dict[Option, tuple[Bytes, float]]] = defaultdict(dict)
    for turn, options in rounds.items():
        tell(f"measuring options of blocks ({len(options)})", turn / (len(rounds) + 1))
        for run, step in _run(step_of, large, options, left_out):
            more = more_bytes(step, steps[-1])
            for name, option in run.items():
                slowdown = _slowdown(step, steps[-1], name, option, profile)
                found[name][option] = more[name], slowdown

    menus: dict[str, Menu] = {}
    full = Option(FULL_KIND)
    every = {name: full for names in kinds for name in names if full in found[names[0]]}
    halves: dict[str, Bytes] = {}
    for run, step in _run(step_of, small, every, left_out) if every else ():
        more = more_bytes(step, steps[0])
        halves |= {name: more[name] for name in run}
    nothing = numpy.zeros(2)
    for names in kinds:
        costs = {option: cost for name in names for option, cost in found[name].items()}
        # The part of the bytes that does not grow with the microbatch is measured under full
        # recompute, and taken for the other options too.
        fixed = 2 * halves[names[0]] - costs[full][0] if names[0] in halves else nothing
        menu = {Option(NONE_KIND): OptionCost(nothing, nothing)}
        for option, (whole, slowdown) in costs.items():
            if option.kind not in without:
                menu[option] = OptionCost((whole + fixed) / 2, whole, slowdown)
        menus |= dict.fromkeys(names, menu)
    # A block that did not run, as its model skips layers at random, costs what others do.
    by_class = {_class_of(blocks[name]): menu for name, menu in menus.items()}
    known = {name: menus.get(name) or by_class.get(_class_of(one)) for name, one in blocks.items()}
    return {name: menu for name, menu in known.items() if menu}, [*left_out.values()]


def _run(
    step_of: StepOf, size: int, options: Mapping[str, Option], left_out: dict[str, str]
) -> Iterator[tuple[Mapping[str, Option], StepEstimate]]:
    """Yield steps with these options; where one can't run, the others run without it."""
    try:
        yield options, step_of(size, options)
    except ERRORS_OF_BLOCKS as error:
        names = [*options]
        if len(names) == 1:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            # Other blocks and policies, which may be many, fail for the same reason.
            reason = why.replace(names[0], "")
            left_out.setdefault(reason, f"{names[0]} can't run as {options[names[0]]}: {why}")
            return
        for part in (names[::2], names[1::2]):
            yield from _run(step_of, size, {name: options[name] for name in part}, left_out)


def more_bytes(step: StepEstimate, plain: StepEstimate) -> dict[str, Bytes]:
    """Return the bytes that each block holds more than in the plain step, and in its backward.

    In its backward, what it and the blocks before it hold more is left out.
    """
    held = 0
    more = {}
    for name, before in plain.blocks.items():
        now = step.blocks[name]
        held += now.held - before.held
        more[name] = numpy.array([now.held - before.held, now.peak - before.peak - held], float)
    return more


def _slowdown(
    step: StepEstimate, plain: StepEstimate, name: str, option: Option, profile: DeviceProfile
) -> float:
    """Predict by what factor the forward and backward of a block take longer."""
    dtype = plain.dtype
    before = profile.work_seconds(*work_of(plain, name), dtype=dtype)
    extra = EXTRA_SECONDS.get(option.kind, 0.0)
    again = numpy.array(step.blocks[name].in_grad_mode)
    after = profile.work_seconds(*work_of(step, name), dtype=dtype, extra_seconds=extra * again)
    if option.kind == FULL_KIND:
        # Its backward may not be told apart from others. All but the last call is computed again.
        found = plain.blocks[name]
        flops = found.calls * sum(flops for _, _, flops in found.expensive[:-1])
        after = max(after, before + flops / profile.flops_per_second[dtype])
    return after / before if before else 1.0
