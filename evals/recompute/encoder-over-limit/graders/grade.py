"""Judge a training that must fit a limit and stay the same."""

from evals_grading import Work, guard, peak_bytes, point

LIMIT = 4_718_592


def losses():
    from train import train

    return train(steps=4)


def peak():
    from train import train

    return peak_bytes(lambda: train(steps=2))


def names():
    from train import build

    return list(build().state_dict())


@point(3)
def below_the_limit(work: Work) -> None:
    """Two steps of train() need at most 4.5 MiB."""
    measured = work.call(peak)
    assert measured <= LIMIT, f"{measured:,} bytes, and {LIMIT:,} are allowed"


@guard(3)
def same_losses(work: Work) -> None:
    """The losses are those of the untouched script to the last bit."""
    measured, required = work.call(losses), work.original(losses)
    assert measured == required, f"{measured} instead of {required}"


@guard(1)
def same_names(work: Work) -> None:
    """The state dict has the same names."""
    assert work.call(names) == work.original(names), "the names changed"


@guard(1)
def model_untouched(work: Work) -> None:
    """model.py is as it was."""
    work.assert_unchanged("model.py")
