"""Judge what a script does with damaged checkpoints."""

from evals_grading import Ended, Work, guard, point

STOPPED, STEPS = 17, 22


def start(work: Work) -> tuple[Work, list]:
    """Return a folder with the checkpoints of steps 10 and 15, and the files of each by age."""
    there = work.copy()
    assert there.run("run.py", str(STOPPED)).status == 0, "the run failed"
    found = sorted(there.folder.glob("checkpoint-*.pt"))
    assert len(found) == 2, f"{len(found)} checkpoints instead of two"
    return there, found


def assert_went_on(work: Work, ended: Ended, first: int, name: str) -> None:
    assert ended.status == 0, f"ended with status {ended.status}: {ended.errors.strip()[-120:]}"
    lines = [line for line in ended.lines if line.startswith("step ")]
    whole = work.copy().run("run.py", str(STEPS)).lines
    assert lines == whole[first - 1 :], f"it went on with {lines[:1]}"
    assert name in ended.output + ended.errors, f"the damaged file {name} is not named"


def flip(path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 4
    path.write_bytes(bytes(data))


@point(4)
def flipped_bits_are_found(work: Work) -> None:
    """With a flipped bit in the values of the newest checkpoint it goes on from the older one."""
    for place in (0.35, 0.55, 0.75):
        there, (_, newest) = start(work)
        flip(newest, place)
        assert_went_on(work, there.run("run.py", str(STEPS)), 11, newest.name)


@point(1)
def cut_file_is_found(work: Work) -> None:
    """The same if the newest file is cut off."""
    there, (_, newest) = start(work)
    newest.write_bytes(newest.read_bytes()[:3000])
    assert_went_on(work, there.run("run.py", str(STEPS)), 11, newest.name)


@point(2)
def nothing_left_is_an_error(work: Work) -> None:
    """With both checkpoints damaged it ends with an error and trains no step."""
    there, found = start(work)
    for path in found:
        flip(path, 0.35)
    ended = there.run("run.py", str(STEPS))
    assert ended.status != 0, "it ended with status 0"
    assert not ended.values("step "), "it trained"


@guard(1)
def whole_checkpoint_is_used(work: Work) -> None:
    """Without damage it goes on from the newest checkpoint."""
    there, _ = start(work)
    ended = there.run("run.py", str(STEPS))
    assert_went_on(work, ended, 16, "")
