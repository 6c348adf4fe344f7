"""Judge the fewest cards for an 8B model under FSDP2, and what rank 0 reserves on them.

The figures are those of one rank's whole steps on shapes in the model of CUDA's allocator; the
commands that solve the case compute them again. 17 cards
reserve 23,562 MiB. Another card does not always save memory: 12 reserve 24,984 and 13 26,554.
"""

from evals_grading import Work, assert_figures, guard, point

CARDS = 18
RESERVED_MIB = {"cards": 21_378, "16": 23_710}


@point(4)
def fewest_cards(work: Work) -> None:
    """The number of cards is the fewest on which a rank fits."""
    given = work.answer()["cards"]
    assert given == CARDS, f"{given}, and {CARDS} are right"


@point(3)
def reserved_memory(work: Work) -> None:
    """The memory that rank 0 reserves is right within 2%, with the fewest cards and with 16."""
    assert_figures(work.answer()["reserved_mib"], RESERVED_MIB, within=0.02)


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
