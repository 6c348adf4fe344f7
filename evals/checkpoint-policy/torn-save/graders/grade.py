"""Judge a script that must survive kills, in the middle of a write too."""

from evals_grading import Work, die_writing, guard, kill, point

STEPS = 24


def straight(work: Work) -> list[str]:
    return work.copy().run("train.py").values("step ")


def resumed(work: Work, at: dict) -> None:
    """Run until the process dies, run again, and compare with an uninterrupted run."""
    there = work.copy()
    first = there.run("train.py", at=at)
    assert first.status < 0, "the process was not killed"
    done = len(first.values("step "))
    again = there.run("train.py")
    assert again.status == 0, f"the next start failed: {again.errors.strip()[-120:]}"
    rest = again.values("step ")
    assert len(rest) <= STEPS - done + 8, f"{len(rest)} steps ran again after {done} were done"
    assert rest == straight(work)[-len(rest) :], "the losses after the resume differ"


@guard(1)
def uninterrupted_as_before(work: Work) -> None:
    """Without a kill the losses are those of the untouched script."""
    required = Work(work.fixture, work.fixture, work.opened)
    assert straight(work) == straight(required), "the losses changed"


@point(2)
def killed_between_saves(work: Work) -> None:
    """Killed after step 14, it goes on from a save of step 12."""
    resumed(work, {"step 14 ": kill})


@point(4)
def killed_within_a_save(work: Work) -> None:
    """Killed in the middle of the save of step 16, it goes on from step 12."""
    for num_bytes in (1024, 20_000):
        resumed(work, {"step 16 ": die_writing(num_bytes)})


@guard(1)
def disk_does_not_fill(work: Work) -> None:
    """After the run at most three checkpoints lie on the disk."""
    there = work.copy()
    before = {path for path in there.folder.rglob("*") if path.is_file()}
    there.run("train.py")
    files = [path for path in there.folder.rglob("*") if path.is_file() and path not in before]
    total = sum(path.stat().st_size for path in files)
    assert 0 < total < 4 * 40_000, f"{total:,} bytes lie there"
