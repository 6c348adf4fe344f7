"""Judge the largest microbatch that fits a card, by what training steps reserve."""

from functools import cache
from pathlib import Path

from evals_grading import Work, assert_figures, assert_largest, guard, point, step_on_card

CARD_MIB = 22_000


@cache
def reserved(fixture: Path, number: int) -> float:
    return float(Work(fixture, fixture).call(step_on_card, number)["reserved"])


@point(5)
def the_largest_that_fits(work: Work) -> None:
    """As many rows fit the card, and one more does not."""
    assert_largest(
        work.answer()["rows"],
        lambda number: reserved(work.fixture, number),
        card=CARD_MIB,
        step=1,
        most=100,
    )


@point(3)
def reserved_memory(work: Work) -> None:
    """Of the right number, the reserved memory is right within 2%."""
    the_largest_that_fits(work)
    given = work.answer()
    right = reserved(work.fixture, given["rows"])
    assert_figures(given, {"reserved_mib": right}, within=0.02)


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
