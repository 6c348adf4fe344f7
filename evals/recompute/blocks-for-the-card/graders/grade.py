"""Judge which blocks recompute: a step fits the card, and recomputes little."""

from functools import cache
from pathlib import Path

from evals_grading import Work, guard, point, step_on_card

ROWS, CARD_MIB = 5, 21_000
PLAIN_FLOPS = 70.32e12  # of a step that recomputes nothing


@cache
def measured(folder: Path) -> dict[str, float]:
    return Work(folder, folder).call(step_on_card, ROWS)


@point(3)
def fits(work: Work) -> None:
    """Training steps reserve at most 21,000 MiB."""
    reserved = measured(work.folder)["reserved"]
    assert reserved <= CARD_MIB, f"{reserved:,.0f} MiB"


@point(4)
def little_is_recomputed(work: Work) -> None:
    """It fits, and a step has at most 8% more FLOPs than without recomputation."""
    fits(work)
    share = measured(work.folder)["flops"] / PLAIN_FLOPS
    assert share <= 1.08, f"{share:.3f} times the FLOPs"


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
