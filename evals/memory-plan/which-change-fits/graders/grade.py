"""Judge what is read from a snapshot: owner and line, and what changes would have reserved.

The figures are those of the simulated training that wrote the snapshot, run again with each
change, and not those of a tool that reads it.
"""

from evals_grading import Work, guard, point

RESERVED_MIB = {"expandable_segments": 2982, "checkpoint": 2508}
CARD_MIB = 2950
LINE, LINE_BYTES = "finetune.py:118", 582_287_360


def assert_reserved(work: Work, name: str) -> None:
    given, required = work.answer()["reserved_mib"][name], RESERVED_MIB[name]
    assert isinstance(given, int | float), f"{name} is {given!r}"
    assert abs(given - required) <= 0.01 * required, f"{given} MiB, and {required} MiB are right"


@point(1)
def line_and_bytes(work: Work) -> None:
    """The line with most bytes at the peak is right, and so are the bytes."""
    given = work.answer()
    measured = given["line"], given["line_bytes"]
    assert measured == (LINE, LINE_BYTES), f"{measured}"


@point(3)
def expandable_segments(work: Work) -> None:
    """With expandable segments the reserved memory is right within 1%."""
    assert_reserved(work, "expandable_segments")


@point(3)
def checkpoint(work: Work) -> None:
    """With checkpointed blocks the reserved memory is right within 1%."""
    assert_reserved(work, "checkpoint")


@point(2)
def which_fits(work: Work) -> None:
    """Exactly the proposals are named that fit the card."""
    fits = sorted(name for name, size in RESERVED_MIB.items() if size <= CARD_MIB)
    assert work.answer()["fits"] == fits, f"{work.answer()['fits']}, and {fits} fit"


@guard(1)
def snapshot_is_unchanged(work: Work) -> None:
    """oom.pickle is untouched."""
    work.assert_unchanged("oom.pickle")
