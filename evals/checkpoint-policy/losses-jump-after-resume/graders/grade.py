"""Judge a script that is stopped and started again."""

from evals_grading import Work, guard, point


def steps(work: Work, *words: str) -> list[str]:
    ended = work.run("forecast.py", *words)
    assert ended.status == 0, f"ended with status {ended.status}: {ended.errors.strip()[-120:]}"
    return [line for line in ended.lines if line.startswith("step ")]


def untouched(work: Work) -> list[str]:
    return steps(Work(work.fixture, work.fixture, work.opened).copy())


def resumed(work: Work, stop: int) -> tuple[list[str], list[str]]:
    there = work.copy()
    steps(there, "--stop-after", str(stop))
    return steps(there), untouched(work)[stop:]


def column(lines: list[str], word: int) -> list[str]:
    return [line.split()[word] for line in lines]


@point(1)
def rate_goes_on(work: Work) -> None:
    """The learning rates after the restart are those of an uninterrupted run."""
    measured, required = resumed(work, 6)
    assert column(measured, 3) == column(required, 3), f"{column(measured, 3)[:3]}"


@point(3)
def stopped_within_an_epoch(work: Work) -> None:
    """Stopped after step 6 and after step 13, the rest of the lines is the same."""
    for stop in (6, 13):
        measured, required = resumed(work, stop)
        assert measured == required, f"after step {stop}: {measured[:1]} instead of {required[:1]}"


@point(2)
def stopped_between_epochs(work: Work) -> None:
    """Stopped after step 5, the end of an epoch, the rest of the lines is the same."""
    measured, required = resumed(work, 5)
    assert measured == required, f"{measured[:1]} instead of {required[:1]}"


@guard(1)
def uninterrupted_as_before(work: Work) -> None:
    """An uninterrupted run prints what the untouched script prints."""
    assert steps(work.copy()) == untouched(work), "the lines changed"
