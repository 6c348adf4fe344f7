"""Judge what a training with evaluations would have reserved with each of two changes.

The figures are those of the simulated training that wrote the snapshot, run again with each
change, and not those of a tool that reads it.
"""

from evals_grading import Work, assert_figures, guard, point

RESERVED_MIB = {"expandable_segments": 2982, "checkpoint": 2430}
CARD_MIB, STEP_MIB = 2950, 50


@point(3)
def expandable_segments(work: Work) -> None:
    """With expandable segments the reserved memory is right within 1%."""
    required = {"expandable_segments": RESERVED_MIB["expandable_segments"]}
    assert_figures(work.answer()["reserved_mib"], required, within=0.01)


@point(3)
def checkpoint(work: Work) -> None:
    """With checkpointed blocks the reserved memory is right within 1%."""
    required = {"checkpoint": RESERVED_MIB["checkpoint"]}
    assert_figures(work.answer()["reserved_mib"], required, within=0.01)


@point(2)
def which_fits(work: Work) -> None:
    """Exactly the proposals are named that fit the card."""
    fits = sorted(name for name, size in RESERVED_MIB.items() if size <= CARD_MIB)
    assert work.answer()["fits"] == fits, f"{work.answer()['fits']}, and {fits} fit"


@point(1)
def smallest_card(work: Work) -> None:
    """The smallest card is right on which the run fits with the better proposal."""
    enough = -(-min(RESERVED_MIB.values()) // STEP_MIB) * STEP_MIB
    given = work.answer()["enough_mib"]
    assert given == enough, f"{given}, and {enough} MiB are right"


@guard(1)
def snapshot_is_unchanged(work: Work) -> None:
    """oom.pickle is untouched."""
    work.assert_unchanged("oom.pickle")
