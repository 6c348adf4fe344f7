"""Judge which lines of a training loop are named as faults; the others look odd and are sound."""

from evals_grading import Work, guard, point

# The lines at which each fault may be named.
FAULTS = {
    "the parts of a window are means of unequal numbers of words": {86, 88},
    "the head that is trained is in no optimizer": {78, 79, 80, 92},
    "each part is clipped, and not the whole window": {89},
}


def named(work: Work) -> set[int]:
    texts = work.answer()["faults"]
    assert all(str(one).startswith("train.py:") for one in texts), f"{texts}"
    return {int(str(one).split(":")[1]) for one in texts}


@point(6)
def three_faults(work: Work) -> None:
    """Each of the three faults is named by one of its lines."""
    given = named(work)
    missed = [fault for fault, lines in FAULTS.items() if not lines & given]
    assert not missed, f"not named: {'; '.join(missed)}"


@point(2)
def no_sound_line(work: Work) -> None:
    """At least one fault is named, and no line that is sound."""
    given, faulty = named(work), set().union(*FAULTS.values())
    assert given, "none is named"
    assert given <= faulty, f"sound lines are named: {sorted(given - faulty)}"


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
