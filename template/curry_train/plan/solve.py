"""Choose an option for each block within a budget, exactly.

Backward runs from the last block to the first. During the backward of block `i`, blocks up to `i`
still hold their bytes, and `i` needs its transient and standing bytes on top. Before the first
backward, all blocks hold their bytes, and the head needs its own on top.

Whether a budget can be met is decided exactly: of two ways to choose the first blocks, the one that
holds less leaves every choice open that the other one does. The cheapest choices are found in three
steps (`chain.py`):

1. A price per byte gives a bound, a first plan, and the choices that no better plan can have.
2. Dynamic programming divides the differences between the remaining choices into at most `LEVELS`
   quanta. For each quantum it keeps the cheapest way to reach it, with its exact bytes.
3. A second pass with finer quanta searches near the plan of the first pass.

No plan is above the budget. No plan costs more than the best plan for a budget that is smaller by
one quantum of the first pass for each block. If the quanta are fine enough to distinguish all sums
of bytes, the plan is optimal.

Proof: `python -m pytest tests/plan/test_solve.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from ..core.wording import require_whole

# Search of a chain of menus: by a price per byte, then by dynamic programming.

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]


class BlockStep(NamedTuple):
    """One choice of a block, with its bytes counted from the floor of the block."""

    place: int  # index of the choice in the menu
    extra: int  # bytes that the choice adds above the floor
    most: int  # the most bytes above the floor with this choice
    cost: float


class _MenuTable(NamedTuple):
    """The menus as arrays with one row per block, padded to the longest menu at infinite cost."""

    costs: Floats
    extras: Integers
    most: Integers

    def fits(self, picks: Integers) -> bool:
        """Check the limit of every block for one pick per block."""
        rows = numpy.arange(len(picks))
        held = numpy.cumsum(self.extras[rows, picks])
        return bool(((held >= 0) & (held <= self.most[rows, picks])).all())


def price_menus(
    menus: Sequence[Sequence[BlockStep]], known: float
) -> tuple[list[int] | None, list[list[BlockStep]]]:
    """Find a first plan by a price per held byte, and prune choices that can't improve on it.

    Return the chosen places, None if no price gives a plan that fits, and the pruned menus. With a
    price on the bytes held at the end, and no other limit, each block chooses alone: that costs at
    most as much as any plan that fits. A choice that raises this bound above the best plan so far
    (`known`, or the one found here) is pruned. A menu is empty where no plan is better.
    """
    table = _tabulate_menus(menus)
    rows = numpy.arange(len(menus))
    room = max(step.most for step in menus[-1])

    rich, poor, price = _find_byte_price(table)
    if poor is None:
        return None, [list(steps) for steps in menus]
    num_poor = _fewest_poor_picks(table, rich, poor)
    picks = numpy.where(rows < num_poor, poor, rich)

    known = min(known, float(table.costs[rows, picks].sum()))
    priced = table.costs + price * table.extras
    least = priced.min(axis=1, keepdims=True)
    gap = known - (float(least.sum()) - price * room)
    # The margin keeps rounding errors from pruning a choice.
    useful = priced - least <= gap + 1e-9 * (abs(known) + price * room)

    chosen = [steps[pick].place for steps, pick in zip(menus, picks, strict=True)]
    pruned = [list(compress(steps, row)) for steps, row in zip(menus, useful.tolist(), strict=True)]
    return chosen, pruned


def _tabulate_menus(menus: Sequence[Sequence[BlockStep]]) -> _MenuTable:
    widest = max(len(steps) for steps in menus)
    costs = []
    extras = []
    most = []
    for steps in menus:
        padding = widest - len(steps)
        costs.append([step.cost for step in steps] + [math.inf] * padding)
        extras.append([step.extra for step in steps] + [0] * padding)
        most.append([step.most for step in steps] + [0] * padding)
    return _MenuTable(numpy.array(costs), numpy.array(extras), numpy.array(most))


def _find_byte_price(table: _MenuTable) -> tuple[Integers, Integers | None, float]:
    """Bisect the price per byte.

    Return the picks just below the price at which the plan fits, those just above it, None if none
    fit, and that price, which is 0 if the cheapest choices fit.
    """
    rich = table.costs.argmin(axis=1)
    if table.fits(rich):
        return rich, rich, 0.0
    poor = None
    price = 0.0
    low = 1e-24
    high = float(numpy.ptp(table.costs[numpy.isfinite(table.costs)])) + 1.0
    for _ in range(50):  # enough for full precision, whatever the unit of the costs
        middle = math.sqrt(low * high)
        picks = (table.costs + middle * table.extras).argmin(axis=1)
        if table.fits(picks):
            high = middle
            poor = picks
            price = middle
        else:
            low = middle
            rich = picks
    return rich, poor, price


def _fewest_poor_picks(table: _MenuTable, rich: Integers, poor: Integers) -> int:
    """Count the blocks from the front that must take the poor pick for the plan to fit.

    Equal blocks change their pick at the same price; this lets the last of them stay rich.
    """
    rows = numpy.arange(len(rich))
    first = 0
    last = len(rich)
    while first < last:
        middle = (first + last) // 2
        if table.fits(numpy.where(rows < middle, poor, rich)):
            last = middle
        else:
            first = middle + 1
    return last


def walk_menus(menus: Sequence[Sequence[BlockStep]], quantum: int) -> list[int] | None:
    """Find the cheapest choice of each menu by dynamic programming; None if it finds none.

    Held bytes are told apart in steps of `quantum`.
    """
    costs = numpy.zeros(1)
    rests = numpy.zeros(1, dtype=numpy.int64)
    picks_of_blocks = []
    for steps in menus:
        costs, rests, picks = _advance(costs, rests, steps, quantum)
        picks_of_blocks.append(picks)
    level = int(numpy.argmin(costs))
    if not numpy.isfinite(costs[level]):
        return None

    held = level * quantum + int(rests[level])  # above the floor, to the byte
    chosen: list[int] = []
    for steps, picks in zip(reversed(menus), reversed(picks_of_blocks), strict=True):
        step = steps[picks[held // quantum]]
        chosen.append(step.place)
        held -= step.extra
    return chosen[::-1]


def _advance(
    costs: Floats, rests: Integers, steps: Sequence[BlockStep], quantum: int
) -> tuple[Floats, Integers, Integers]:
    """Advance the dynamic program by one block.

    Takes the costs and rests of the previous block. Returns, for each number of quanta held, the
    least cost, the rest (the bytes beyond whole quanta) and the step taken. The cost is infinite
    where no step leads to that number of quanta.
    """
    num_levels = max(step.most for step in steps) // quantum + 1
    # One more level at either end keeps every window whole.
    reached = numpy.full(num_levels + 2, numpy.inf)
    # Twice the index of the step, plus one where its rest filled a quantum.
    ways = numpy.zeros(num_levels + 2, dtype=numpy.int64)
    extras = numpy.array([step.extra for step in steps], dtype=numpy.int64)
    most = numpy.array([step.most for step in steps], dtype=numpy.int64)

    held = numpy.arange(len(costs)) * quantum + rests
    firsts = numpy.searchsorted(held, -extras).tolist()
    ends = numpy.searchsorted(held, most - extras, side="right").tolist()
    for way, (step, first, end) in enumerate(zip(steps, firsts, ends, strict=True)):
        whole, rest = divmod(step.extra, quantum)
        total = costs[first:end] + step.cost
        carried = rests[first:end] >= quantum - rest
        for carry, fits in ((0, ~carried), (1, carried)) if rest else ((0, ~carried),):
            window = slice(first + whole + carry + 1, end + whole + carry + 1)
            fits &= total < reached[window]
            numpy.copyto(reached[window], total, where=fits)
            numpy.copyto(ways[window], 2 * way + carry, where=fits)

    ways = ways[1:-1]
    reached = reached[1:-1]
    picks = ways >> 1
    carries = ways & 1
    wholes, remainders = numpy.divmod(extras[picks], quantum)
    possible = numpy.isfinite(reached)
    origins = numpy.where(possible, numpy.arange(num_levels) - wholes - carries, 0)
    new_rests = numpy.where(possible, rests[origins] + remainders - carries * quantum, 0)
    return reached, new_rests, picks


def unbeaten(rows: Sequence[tuple[float, int, int]]) -> list[int]:
    """Return the indices of the rows that no other row beats or equals in every column.

    Smaller is better. Of equal rows the first is returned.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    first = numpy.array([rows[index][1] for index in order])
    second = numpy.array([rows[index][2] for index in order])
    first_no_larger = first[:, None] <= first
    second_no_larger = second[:, None] <= second
    beaten = numpy.any(numpy.triu(first_no_larger & second_no_larger, 1), axis=0)
    return [order[position] for position in numpy.flatnonzero(~beaten)]


# Solver: choose an option for each block so that the step fits the budget and costs least.

NUM_QUANTA = 1 << 10  # quanta at each block; the time is proportional to it
SEARCH_PASSES = 2  # the second pass searches near the plan of the first
NARROWING_FACTOR = 16  # factor by which the second search, and so its quanta, are narrower


@dataclass(frozen=True)
class Choice:
    """One way to run a block."""

    name: str
    held_bytes: int  # after forward
    transient_bytes: int  # the most on top of them during its own forward or backward
    cost: float  # in any unit

    def __post_init__(self) -> None:
        _check_bytes(f"held_bytes of the choice {self.name!r}", self.held_bytes)
        _check_bytes(f"transient_bytes of the choice {self.name!r}", self.transient_bytes)
        if not math.isfinite(self.cost):
            raise ValueError(
                f"the cost of the choice {self.name!r} is {self.cost}: give a finite number, or "
                "leave the choice out"
            )


@dataclass(frozen=True)
class Stage:
    """One block of the chain."""

    choices: tuple[Choice, ...]  # its menu
    standing_bytes: int = 0  # in memory whenever the block is in backward, such as gradients

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError(
                "a stage has no choices: give at least one, such as the block as it is"
            )
        _check_bytes("standing_bytes of a stage", self.standing_bytes)


@dataclass(frozen=True)
class Solution:
    """The choices for a chain, with their peak and cost."""

    chosen: tuple[int, ...]  # index of the choice of each stage
    peak_bytes: int
    cost: float


def peak_of(stages: Sequence[Stage], chosen: Sequence[int], *, head_bytes: int = 0) -> int:
    """Return the exact peak of these choices."""
    held = 0
    peak = 0
    for stage, index in zip(stages, chosen, strict=True):
        choice = stage.choices[index]
        held += choice.held_bytes
        peak = max(peak, held + choice.transient_bytes + stage.standing_bytes)
    return max(peak, held + head_bytes)


def _check_bytes(what: str, value: int) -> None:
    require_whole(what, value, least=0, hint="give the bytes as an int")


def solve(stages: Sequence[Stage], budget_bytes: int, *, head_bytes: int = 0) -> Solution | None:
    """Find the cheapest choices whose peak fits the budget; None if and only if none fit."""
    require_whole("budget_bytes", budget_bytes, least=1, hint="give it in bytes")
    _check_bytes("head_bytes", head_bytes)
    if _least_held(stages, budget_bytes, head_bytes) is None:
        return None
    return _cheapest(stages, budget_bytes, head_bytes)


def least_peak(stages: Sequence[Stage], *, head_bytes: int = 0) -> Solution:
    """Find the choices with the least peak, to the byte; of those the cheapest, as in `solve`."""
    _check_bytes("head_bytes", head_bytes)
    too_small = -1
    enough = peak_of(stages, [0] * len(stages), head_bytes=head_bytes)
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if _least_held(stages, middle, head_bytes) is None:
            too_small = middle
        else:
            enough = middle
    return _cheapest(stages, enough, head_bytes)


def _least_held(stages: Sequence[Stage], budget: int, head: int) -> list[int] | None:
    """Compute the least bytes held before each stage and after the last one.

    None if the budget is too small. Holding less so far never rules out a later choice, so one pass
    from the front is exact.
    """
    least = [0]
    for stage in stages:
        room = budget - stage.standing_bytes - least[-1]
        held = [c.held_bytes for c in stage.choices if c.held_bytes + c.transient_bytes <= room]
        if not held:
            return None
        least.append(least[-1] + min(held))
    return least if least[-1] + head <= budget else None


def _most_held(stages: Sequence[Stage], budget: int, head: int) -> list[int]:
    """Compute the most bytes held before each stage, and after the last, that still fit later."""
    most = [budget - head]
    for stage in reversed(stages):
        room = budget - stage.standing_bytes
        most.append(
            max(min(most[-1], room - c.transient_bytes) - c.held_bytes for c in stage.choices)
        )
    return most[::-1]


def _cheapest(stages: Sequence[Stage], budget: int, head: int) -> Solution:
    """Find the cheapest choices for a budget that can be met.

    The first pass searches everywhere, the second one in a corridor around the plan found so far,
    with finer quanta.
    """
    if not stages:
        return Solution((), head, 0.0)
    floors = _least_held(stages, budget, head)
    assert floors is not None
    ceilings = _most_held(stages, budget, head)
    best = None
    open_choices: list[Sequence[int]] = [range(len(stage.choices)) for stage in stages]
    for _ in range(SEARCH_PASSES):
        menus = _menus(stages, open_choices, budget, floors, ceilings)
        if not all(menus):
            break  # no plan stays inside the corridor
        priced, menus = price_menus(menus, math.inf if best is None else best.cost)
        best = _better(stages, priced, head, best)
        if not all(menus):
            break  # the plan found is the best one in the corridor

        reach = max(step.most for steps in menus for step in steps)
        quantum = max(1, math.gcd(*(step.extra for steps in menus for step in steps)))
        exact = reach // quantum < NUM_QUANTA
        if not exact:
            quantum = reach // NUM_QUANTA + 1
        best = _better(stages, walk_menus(menus, quantum), head, best)
        if exact or best is None:
            break

        open_choices = [_open_places(steps) for steps in menus]
        held_by_stage = [
            stage.choices[index].held_bytes
            for stage, index in zip(stages, best.chosen, strict=True)
        ]
        path = [0, *accumulate(held_by_stage)]
        width = quantum * NUM_QUANTA // (2 * NARROWING_FACTOR)
        floors = [max(floor, held - width) for floor, held in zip(floors, path, strict=True)]
        ceilings = [
            min(ceiling, held + width) for ceiling, held in zip(ceilings, path, strict=True)
        ]
    assert best is not None
    return best


def _open_places(steps: Sequence[BlockStep]) -> list[int]:
    return [step.place for step in steps]


def _better(
    stages: Sequence[Stage], chosen: Sequence[int] | None, head: int, best: Solution | None
) -> Solution | None:
    """Return the cheaper of the new choices and the best solution so far."""
    if chosen is None:
        return best
    cost = math.fsum(stage.choices[index].cost for stage, index in zip(stages, chosen, strict=True))
    if best is not None and cost >= best.cost:
        return best
    return Solution(tuple(chosen), peak_of(stages, chosen, head_bytes=head), cost)


def _menus(
    stages: Sequence[Stage],
    open_choices: Sequence[Sequence[int]],
    budget: int,
    floors: Sequence[int],
    ceilings: Sequence[int],
) -> list[list[BlockStep]]:
    """List the choices of each stage that fit the corridor and that no other choice beats there."""
    reach = 0
    menus = []
    for position, stage in enumerate(stages):
        floor = floors[position + 1]
        rise = floor - floors[position]
        steps = []
        for index in open_choices[position]:
            choice = stage.choices[index]
            extra = choice.held_bytes - rise
            room = budget - stage.standing_bytes - choice.transient_bytes
            most = min(ceilings[position + 1], room) - floor
            # More than this can't be reached: transient bytes that always fit cost nothing.
            most = min(most, reach + extra)
            if most >= max(0, extra):
                steps.append(BlockStep(index, extra, most, choice.cost))
        reach = max((step.most for step in steps), default=0)
        rows = [(step.cost, step.extra, step.extra - step.most) for step in steps]
        menus.append([steps[index] for index in unbeaten(rows)])
    return menus
