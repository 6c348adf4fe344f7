"""Two searches along a chain of menus: a price for bytes, and dynamic programming over the bytes held so far.

Bytes count from a floor that rises from block to block, so that only what the choices make of a difference is divided
into quanta. Proof: `python -m pytest tests/test_solve.py`.
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
    """A choice as the chain sees it: its place in the menu, what it adds to the bytes above the floor, the most that
    may be above the floor with it, and its cost."""

    place: int
    extra: int
    most: int
    cost: float


def price_menus(
    menus: Sequence[Sequence[Step]], known: float
) -> tuple[list[int] | None, list[list[Step]]]:
    """Choices that a price for each byte leads to, None if none fit, and the menus without what is in no better plan.

    With a price for the bytes held at the end, and no other limit, each block chooses alone: that costs at most what
    any plan that fits does. A choice that raises this bound above the best plan that is known, by `known` or from
    here, can be left out. A menu is empty where no plan is better.
    """
    widest = max(len(steps) for steps in menus)
    costs = numpy.array(
        [[s.cost for s in steps] + [math.inf] * (widest - len(steps)) for steps in menus]
    )
    extras, most = (
        numpy.array(
            [[step[column] for step in steps] + [0] * (widest - len(steps)) for steps in menus]
        )
        for column in (1, 2)
    )
    rows, room = numpy.arange(len(menus)), max(step.most for step in menus[-1])

    def fit(picks: Integers) -> bool:
        held = numpy.cumsum(extras[rows, picks])
        return bool(((held >= 0) & (held <= most[rows, picks])).all())

    rich, price = costs.argmin(axis=1), 0.0
    poor = rich if fit(rich) else None
    if poor is None:
        low, high = 1e-24, float(numpy.ptp(costs[numpy.isfinite(costs)])) + 1.0
        for _ in range(50):  # the price is found to the last digits, whatever the unit of the costs
            middle = math.sqrt(low * high)
            picks = (costs + middle * extras).argmin(axis=1)
            if fit(picks):
                high, poor, price = middle, picks, middle
            else:
                low, rich = middle, picks
    if poor is None:
        return None, [list(steps) for steps in menus]
    first, last = (
        0,
        len(menus),
    )  # equal blocks change their minds at the same price: let only the last ones do so
    while first < last:
        middle = (first + last) // 2
        first, last = (
            (first, middle) if fit(numpy.where(rows < middle, poor, rich)) else (middle + 1, last)
        )
    picks = numpy.where(rows < last, poor, rich)
    known = min(known, float(costs[rows, picks].sum()))
    priced = costs + price * extras
    least = priced.min(axis=1, keepdims=True)
    gap = known - (float(least.sum()) - price * room)
    kept = priced - least <= gap + 1e-9 * (abs(known) + price * room)  # rounding leaves nothing out
    chosen = [steps[pick].place for steps, pick in zip(menus, picks, strict=True)]
    return chosen, [
        list(compress(steps, row)) for steps, row in zip(menus, kept.tolist(), strict=True)
    ]


def walk_menus(menus: Sequence[Sequence[Step]], quantum: int) -> list[int] | None:
    """The cheapest choice of each menu that dynamic programming finds with this quantum; None if it finds none."""
    costs, rests, taken = numpy.zeros(1), numpy.zeros(1, dtype=numpy.int64), []
    for steps in menus:
        costs, rests, picks = _advance(costs, rests, steps, quantum)
        taken.append(picks)
    level = int(numpy.argmin(costs))
    if not numpy.isfinite(costs[level]):
        return None
    held = level * quantum + int(rests[level])  # above the floor, to the byte
    chosen: list[int] = []
    for steps, picks in zip(reversed(menus), reversed(taken), strict=True):
        step = steps[picks[held // quantum]]
        chosen.append(step.place)
        held -= step.extra
    return chosen[::-1]


def _advance(
    costs: Floats, rests: Integers, steps: Sequence[Step], quantum: int
) -> tuple[Floats, Integers, Integers]:
    """One block further: for each quantum held the least cost, the bytes beyond whole quanta, and the step taken.

    The costs and rests of the block before come in. Where nothing leads to a quantum the cost is infinite.
    """
    num_levels = max(step.most for step in steps) // quantum + 1
    reached = numpy.full(
        num_levels + 2, numpy.inf
    )  # one more at either end, so that every window is whole
    ways = numpy.zeros(
        num_levels + 2, dtype=numpy.int64
    )  # twice the step, and one where its rest made a quantum full
    extras, most = (
        numpy.array(column, dtype=numpy.int64) for column in list(zip(*steps, strict=True))[1:3]
    )
    held = numpy.arange(len(costs)) * quantum + rests
    firsts = numpy.searchsorted(held, -extras).tolist()
    ends = numpy.searchsorted(held, most - extras, side="right").tolist()
    for way, (step, first, end) in enumerate(zip(steps, firsts, ends, strict=True)):
        whole, rest = divmod(step.extra, quantum)
        total, carried = costs[first:end] + step.cost, rests[first:end] >= quantum - rest
        for carry, fits in ((0, ~carried), (1, carried)) if rest else ((0, ~carried),):
            window = slice(first + whole + carry + 1, end + whole + carry + 1)
            fits &= total < reached[window]
            numpy.copyto(reached[window], total, where=fits)
            numpy.copyto(ways[window], 2 * way + carry, where=fits)
    ways, reached = ways[1:-1], reached[1:-1]
    picks, carries = ways >> 1, ways & 1
    wholes, parts = numpy.divmod(extras[picks], quantum)
    origins = numpy.where(numpy.isfinite(reached), numpy.arange(num_levels) - wholes - carries, 0)
    return (
        reached,
        numpy.where(numpy.isfinite(reached), rests[origins] + parts - carries * quantum, 0),
        picks,
    )


def unbeaten(rows: Sequence[tuple[float, int, int]]) -> list[int]:
    """Indices of the rows that no other is at most as large as in every column; of equal rows the first."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    first, second = (numpy.array([rows[index][column] for index in order]) for column in (1, 2))
    beaten = numpy.any(
        numpy.triu((first[:, None] <= first) & (second[:, None] <= second), 1), axis=0
    )
    return [order[position] for position in numpy.flatnonzero(~beaten)]
