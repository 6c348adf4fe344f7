"""Judge what is read from a snapshot of 50 MB: the line that keeps memory, and other owners.

The figures are those of the simulated training that wrote the snapshot.
"""

from evals_grading import Work, assert_figures, guard, point

LINE = "rank.py:83"
LINE_BYTES = 49 * 4 * 2**20
OWNERS = {"parameter_bytes": 77_611_008, "optimizer_bytes": 155_222_016}


@point(4)
def line_and_bytes(work: Work) -> None:
    """The line with most bytes at the peak is right, and so are its bytes."""
    given = work.answer()
    assert given["line"] == LINE, f"it is {given['line']!r}"
    assert_figures(given, {"line_bytes": LINE_BYTES}, within=0.001)


@point(3)
def owners(work: Work) -> None:
    """The bytes of parameters and of the optimizer's state are right."""
    assert_figures(work.answer(), OWNERS, within=0.001)


@guard(1)
def snapshot_is_unchanged(work: Work) -> None:
    """oom.zip is untouched."""
    work.assert_unchanged("oom.zip")
