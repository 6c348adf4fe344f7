"""Choose for each block how much it keeps, so that the step fits and costs least: a chain problem.

Backward runs from the last block to the first. While block `i` is in it, blocks up to `i` still hold what they keep,
and `i` has its transient and standing bytes on top; before that, all hold theirs and the head has its own.

Whether a budget can be met is decided exactly: of two ways to begin, the one that holds less leaves open every choice
that the other does. What is cheapest is looked for in three steps (`chain.py`). A price for bytes gives a bound, a
first plan, and the choices that are in no better plan. Dynamic programming in at most `LEVELS` quanta of what the other
choices make of a difference keeps, for each quantum, the cheapest way to reach it with its exact bytes. A second pass
with finer quanta looks near what the first one found.

No plan is above the budget. None costs more than the best plan of a budget that is smaller by one quantum of the first
pass for each block. Where the quanta are fine enough to tell all sums of bytes apart, the plan is the best there is.
Proof: `python -m pytest tests/test_solve.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .chain import Step, price_menus, unbeaten, walk_menus

LEVELS = 1 << 10  # quanta at each block; more of them cost time in proportion
PASSES = 2  # the second one looks near what the first one found
NARROWER = 16  # by this factor, so that its quanta are so much finer


@dataclass(frozen=True)
class Choice:
    """One way to run a block: the bytes that it holds after forward, the most it needs on top at any moment of its own
    forward or backward, and what it costs, in any unit."""

    name: str
    held_bytes: int
    transient_bytes: int
    cost: float

    def __post_init__(self) -> None:
        _check_bytes(f"held_bytes of the choice {self.name!r}", self.held_bytes)
        _check_bytes(f"transient_bytes of the choice {self.name!r}", self.transient_bytes)
        if not math.isfinite(self.cost):
            raise ValueError(
                f"the cost of the choice {self.name!r} is {self.cost}: give a number, or leave out what is not possible"
            )


@dataclass(frozen=True)
class Stage:
    """A block of the chain: its menu, and bytes that are there whenever it is in backward, such as gradients."""

    choices: tuple[Choice, ...]
    standing_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError(
                "a stage has no choices: give at least one, such as the block as it is"
            )
        _check_bytes("standing_bytes of a stage", self.standing_bytes)


@dataclass(frozen=True)
class Solution:
    """The chosen index of each stage, the peak that they lead to, and their cost."""

    chosen: tuple[int, ...]
    peak_bytes: int
    cost: float


def peak_of(stages: Sequence[Stage], chosen: Sequence[int], *, head_bytes: int = 0) -> int:
    """The peak of these choices, exactly."""
    held, peak = 0, 0
    for stage, index in zip(stages, chosen, strict=True):
        choice = stage.choices[index]
        held += choice.held_bytes
        peak = max(peak, held + choice.transient_bytes + stage.standing_bytes)
    return max(peak, held + head_bytes)


def solve(stages: Sequence[Stage], budget_bytes: int, *, head_bytes: int = 0) -> Solution | None:
    """The cheapest choices whose peak is within the budget; None exactly where there are none."""
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 1:
        raise ValueError(
            f"budget_bytes must be a whole number of at least 1, got {budget_bytes!r}: give it in bytes"
        )
    _check_bytes("head_bytes", head_bytes)
    if _least_held(stages, budget_bytes, head_bytes) is None:
        return None
    return _cheapest(stages, budget_bytes, head_bytes)


def least_peak(stages: Sequence[Stage], *, head_bytes: int = 0) -> Solution:
    """The choices with the least peak that there is, to the byte; of those the cheapest, as `solve` finds it."""
    _check_bytes("head_bytes", head_bytes)
    too_small, enough = -1, peak_of(stages, [0] * len(stages), head_bytes=head_bytes)
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if _least_held(stages, middle, head_bytes) is None:
            too_small = middle
        else:
            enough = middle
    return _cheapest(stages, enough, head_bytes)


def non_dominated(choices: Sequence[Choice]) -> list[int]:
    """Indices of the choices that no other one beats in held bytes, transient bytes and cost together."""
    return unbeaten(
        [(choice.cost, choice.held_bytes, choice.transient_bytes) for choice in choices]
    )


def _check_bytes(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"{what} must be a whole number of at least 0, got {value!r}: give the bytes as an int"
        )


def _least_held(stages: Sequence[Stage], budget: int, head: int) -> list[int] | None:
    """The least that can be held before each stage and after the last one, within the budget; None if it is too small.

    Holding less so far never closes a choice that holding more leaves open, so one pass from the front is exact.
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
    """The most that may be held before each stage and after the last one so that the stages from there on still fit."""
    most = [budget - head]
    for stage in reversed(stages):
        room = budget - stage.standing_bytes
        most.append(
            max(min(most[-1], room - c.transient_bytes) - c.held_bytes for c in stage.choices)
        )
    return most[::-1]


def _cheapest(stages: Sequence[Stage], budget: int, head: int) -> Solution:
    """The cheapest choices for a budget that some choices meet: looked for anywhere, then in a corridor around what was
    found so far, with finer quanta."""
    if not stages:
        return Solution((), head, 0.0)
    floors = _least_held(stages, budget, head)
    assert floors is not None
    ceilings, best = _most_held(stages, budget, head), None
    open_choices: list[Sequence[int]] = [range(len(stage.choices)) for stage in stages]
    for _ in range(PASSES):
        menus = _menus(stages, open_choices, budget, floors, ceilings)
        if not all(menus):
            break  # nothing stays in the corridor all along
        priced, menus = price_menus(menus, math.inf if best is None else best.cost)
        best = _better(stages, priced, head, best)
        if not all(menus):
            break  # what was found is the best there is in the corridor
        reach = max(step.most for steps in menus for step in steps)
        quantum = max(1, math.gcd(*(step.extra for steps in menus for step in steps)))
        exact = reach // quantum < LEVELS
        if not exact:
            quantum = reach // LEVELS + 1
        best = _better(stages, walk_menus(menus, quantum), head, best)
        if exact or best is None:
            break
        open_choices = [[step.place for step in steps] for steps in menus]
        path = [
            0,
            *accumulate(
                stage.choices[i].held_bytes for stage, i in zip(stages, best.chosen, strict=True)
            ),
        ]
        width = quantum * LEVELS // (2 * NARROWER)
        floors = [max(floor, held - width) for floor, held in zip(floors, path, strict=True)]
        ceilings = [
            min(ceiling, held + width) for ceiling, held in zip(ceilings, path, strict=True)
        ]
    assert best is not None
    return best


def _better(
    stages: Sequence[Stage], chosen: Sequence[int] | None, head: int, best: Solution | None
) -> Solution | None:
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
    """The choices of each stage that can be taken inside the corridor and that no other one beats there."""
    reach, menus = 0, []
    for position, stage in enumerate(stages):
        rise, floor = floors[position + 1] - floors[position], floors[position + 1]
        steps = []
        for index in open_choices[position]:
            choice = stage.choices[index]
            extra = choice.held_bytes - rise
            most = (
                min(ceilings[position + 1], budget - stage.standing_bytes - choice.transient_bytes)
                - floor
            )
            most = min(
                most, reach + extra
            )  # transient bytes that always fit here are as good as none
            if most >= max(0, extra):
                steps.append(Step(index, extra, most, choice.cost))
        reach = max((step.most for step in steps), default=0)
        menus.append(
            [steps[i] for i in unbeaten([(s.cost, s.extra, s.extra - s.most) for s in steps])]
        )
    return menus
