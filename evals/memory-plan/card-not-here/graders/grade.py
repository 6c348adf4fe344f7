"""Judge the memory that a training reserves on a card, by what it reserved there once.

The figures are recorded ones: `recorded` of `steps` in `evidence/cuda_traces.json`.
"""

from evals_grading import Work, assert_figures, guard, point

RESERVED_MIB = {"128": 71_180.0, "512": 71_306.0}
CARD_MIB = 71_500


@point(2)
def within_two_percent(work: Work) -> None:
    """Both figures are right within 2%."""
    assert_figures(work.answer()["reserved_mib"], RESERVED_MIB, within=0.02)


@point(3)
def within_half_a_percent(work: Work) -> None:
    """Both figures are right within 0.5%."""
    assert_figures(work.answer()["reserved_mib"], RESERVED_MIB, within=0.005)


@point(3)
def which_fits(work: Work) -> None:
    """Exactly the lengths are named that fit."""
    fits = [name for name, size in RESERVED_MIB.items() if size <= CARD_MIB]
    given = [str(one) for one in work.answer()["fits"] or ()]
    assert given == fits, f"{given}, and {fits} fit"


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
