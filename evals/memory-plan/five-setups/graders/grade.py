"""Judge what five setups reserve on a card, their order, and which of them fit.

The figures are those of whole steps on shapes in the model of CUDA's allocator; the commands that
solve the case compute them again.
"""

from evals_grading import Work, assert_figures, guard, point

CARD_MIB = 22_880
RESERVED_MIB = {
    "plain": 18_784,
    "fused": 20_974,
    "halves": 22_796,
    "checkpointed": 24_992,
    "eight-bit": 22_960,
}
ORDER = sorted(RESERVED_MIB, key=RESERVED_MIB.__getitem__)


@point(3)
def reserved_memory(work: Work) -> None:
    """The reserved memory of each setup is right within 6%."""
    assert_figures(work.answer()["reserved_mib"], RESERVED_MIB, within=0.06)


@point(5)
def which_fit(work: Work) -> None:
    """Exactly the setups are named that fit the card, in their order."""
    fits = [name for name in ORDER if RESERVED_MIB[name] <= CARD_MIB]
    given = work.answer()["fits"]
    assert given == fits, f"{given}, and {fits} fit"


@point(2)
def order(work: Work) -> None:
    """The figures are in the right order."""
    given = work.answer()["reserved_mib"]
    missing = [name for name in ORDER if not isinstance(given.get(name), int | float)]
    assert not missing, f"{missing} have no figure"
    ranked = sorted(ORDER, key=given.__getitem__)
    assert ranked == ORDER, f"{ranked}, and {ORDER} is right"


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
