"""Judge whether a run that was stopped or killed anywhere goes on as if it had not been."""

from evals_grading import Work, guard, kill, point

STEPS = 18


def straight(work: Work) -> list[str]:
    return work.copy().run("train.py").values("step ")


def assert_resumes(work: Work, *words: str, after: int, at=None) -> None:
    there = work.copy()
    there.run("train.py", *words, at=at)
    again = there.run("train.py", "--resume")
    assert again.status == 0, f"the next start failed: {again.errors.strip()[-120:]}"
    required = straight(work)[after:]
    assert again.values("step ") == required, f"resumed after step {after} the losses differ"


@point(4)
def resumes_after_a_stop(work: Work) -> None:
    """Stopped after any step it goes on with the losses of an uninterrupted run, to the digit."""
    for step in (2, 7, 12):
        assert_resumes(work, "--stop-after", str(step), after=step)


@point(3)
def resumes_after_a_kill(work: Work) -> None:
    """Killed in step 11, it goes on so from the save of step 9."""
    assert_resumes(work, after=9, at={"step 11 ": kill})


@guard(2)
def uninterrupted_as_before(work: Work) -> None:
    """An uninterrupted run prints the losses of the untouched script."""
    required = Work(work.fixture, work.fixture, work.opened)
    assert straight(work) == straight(required), "the losses changed"
    assert len(straight(work)) == STEPS
