"""Judge the largest chunk of the loss that fits a card, by what training steps reserve."""

from functools import cache
from pathlib import Path

from evals_grading import Work, assert_figures, assert_largest, guard, point, step_on_card

CARD_MIB = 22_000


@cache
def reserved(fixture: Path, number: int) -> float:
    return float(
        Work(fixture, fixture).call(lambda: step_on_card(2, loss_of={"chunk": number}))["reserved"]
    )


@point(5)
def the_largest_that_fits(work: Work) -> None:
    """As many tokens at a time fit the card, and twice as many do not."""
    assert_largest(
        work.answer()["chunk"],
        lambda number: reserved(work.fixture, number),
        card=CARD_MIB,
        step=work.answer()["chunk"],
        most=8192,
    )


@point(3)
def reserved_memory(work: Work) -> None:
    """Of the right number, the reserved memory is right within 2%."""
    the_largest_that_fits(work)
    given = work.answer()
    right = reserved(work.fixture, given["chunk"])
    assert_figures(given, {"reserved_mib": right}, within=0.02)


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
