"""Search of a chain of menus: by a price per byte, then by dynamic programming.

Bytes are counted from a floor that rises from block to block, so that only the differences between
choices are divided into quanta.

Proof: `python -m pytest tests/test_solve.py`.
"""

import math
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]


class Step(NamedTuple):
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
    menus: Sequence[Sequence[Step]], known: float
) -> tuple[list[int] | None, list[list[Step]]]:
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


def _tabulate_menus(menus: Sequence[Sequence[Step]]) -> _MenuTable:
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


def walk_menus(menus: Sequence[Sequence[Step]], quantum: int) -> list[int] | None:
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
    costs: Floats, rests: Integers, steps: Sequence[Step], quantum: int
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
