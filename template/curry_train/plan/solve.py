"""Solver: choose an option for each block so that the step fits the budget and costs least.

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

Proof: `python -m pytest tests/test_solve.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .chain import Step, price_menus, unbeaten, walk_menus

LEVELS = 1 << 10  # quanta at each block; the time is proportional to it
PASSES = 2  # the second pass searches near the plan of the first
NARROWER = 16  # factor by which the second search, and so its quanta, are narrower


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


def solve(stages: Sequence[Stage], budget_bytes: int, *, head_bytes: int = 0) -> Solution | None:
    """Find the cheapest choices whose peak fits the budget; None if and only if none fit."""
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 1:
        raise ValueError(
            f"budget_bytes must be a whole number of at least 1, got {budget_bytes!r}: "
            "give it in bytes"
        )
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


def non_dominated(choices: Sequence[Choice]) -> list[int]:
    """Return the indices of choices that no other beats in held bytes, transient bytes and cost."""
    return unbeaten(
        [(choice.cost, choice.held_bytes, choice.transient_bytes) for choice in choices]
    )


def _check_bytes(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"{what} must be a whole number of at least 0, got {value!r}: give the bytes as an int"
        )


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
    for _ in range(PASSES):
        menus = _menus(stages, open_choices, budget, floors, ceilings)
        if not all(menus):
            break  # no plan stays inside the corridor
        priced, menus = price_menus(menus, math.inf if best is None else best.cost)
        best = _better(stages, priced, head, best)
        if not all(menus):
            break  # the plan found is the best one in the corridor

        reach = max(step.most for steps in menus for step in steps)
        quantum = max(1, math.gcd(*(step.extra for steps in menus for step in steps)))
        exact = reach // quantum < LEVELS
        if not exact:
            quantum = reach // LEVELS + 1
        best = _better(stages, walk_menus(menus, quantum), head, best)
        if exact or best is None:
            break

        open_choices = [_open_places(steps) for steps in menus]
        held_by_stage = [
            stage.choices[index].held_bytes
            for stage, index in zip(stages, best.chosen, strict=True)
        ]
        path = [0, *accumulate(held_by_stage)]
        width = quantum * LEVELS // (2 * NARROWER)
        floors = [max(floor, held - width) for floor, held in zip(floors, path, strict=True)]
        ceilings = [
            min(ceiling, held + width) for ceiling, held in zip(ceilings, path, strict=True)
        ]
    assert best is not None
    return best


def _open_places(steps: Sequence[Step]) -> list[int]:
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
) -> list[list[Step]]:
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
                steps.append(Step(index, extra, most, choice.cost))
        reach = max((step.most for step in steps), default=0)
        rows = [(step.cost, step.extra, step.extra - step.most) for step in steps]
        menus.append([steps[index] for index in unbeaten(rows)])
    return menus
