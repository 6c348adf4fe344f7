"""Judge how a run ends in which the loss becomes NaN."""

from evals_grading import Ended, Work, guard, point


def night(work: Work, bad: str) -> tuple[Work, Ended]:
    """Run with other bad steps."""
    there = work.copy()
    path = there.folder / "clicks.py"
    path.write_text((work.fixture / "clicks.py").read_text().replace("bad=(13,)", f"bad={bad}"))
    return there, there.run("nightly.py")


def weights(name="model.pt"):
    import torch

    return [one for value in torch.load(name).values() for one in value.flatten().tolist()]


def after(work: Work, steps: int) -> list[float]:
    """Return the weights that the untouched script has saved after so many healthy steps."""
    fixture = Work(work.fixture, work.fixture, work.opened).copy()
    path = fixture.folder / "clicks.py"
    text = path.read_text().replace("bad=(13,)", "bad=()")
    path.write_text(text.replace("count=20", f"count={steps}"))
    assert fixture.run("nightly.py").status == 0
    return fixture.call(weights)


@point(2)
def status_tells(work: Work) -> None:
    """With a NaN in step 13 the status is not 0, and the message names the step."""
    for step in (13, 7):
        _, ended = night(work, f"({step},)")
        assert ended.status != 0, "the status is 0"
        assert ended.status > 0, "it was ended by a signal"
        said = ended.errors + (ended.lines[-1] if ended.lines else "")
        assert str(step) in said, f"step {step} is not named: {said.strip()[-80:]}"


@point(3)
def good_model_stays(work: Work) -> None:
    """After a NaN in step 13 model.pt is the save of step 10; after one in step 10, of step 5."""
    for step, saved in ((13, 10), (10, 5)):
        there, _ = night(work, f"({step},)")
        assert there.call(weights) == after(work, saved), f"not the save of step {saved}"


@point(1)
def stops_at_once(work: Work) -> None:
    """No step after the bad one is trained."""
    _, ended = night(work, "(13,)")
    assert len(ended.values("step ")) <= 13, f"{len(ended.values('step '))} steps ran"


@guard(2)
def healthy_night_as_before(work: Work) -> None:
    """A healthy night prints and writes what the untouched script does."""
    there, ended = night(work, "()")
    assert ended.status == 0, "it failed"
    fixture = Work(work.fixture, work.fixture, work.opened)
    assert ended.lines == night(fixture, "()")[1].lines, "the lines changed"
    assert there.call(weights) == after(work, 20), "the model changed"
