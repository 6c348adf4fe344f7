"""Judge the peak of a training that is owned by weights, gradients and optimizer."""

from evals_grading import Work, assert_close, guard, peak_bytes, point


def peak():
    from wide import build, train

    weights = sum(one.numel() * 4 for one in build().parameters())
    return peak_bytes(train) / weights


def losses():
    from wide import train

    return train(steps=6)


@point(2)
def below_4_5(work: Work) -> None:
    """The peak is below 4.5 times the weights."""
    times = work.call(peak)
    assert times < 4.5, f"{times:.2f} times the weights"


@point(4)
def below_3_5(work: Work) -> None:
    """The peak is below 3.5 times the weights."""
    times = work.call(peak)
    assert times < 3.5, f"{times:.2f} times the weights"


@guard(3)
def same_losses(work: Work) -> None:
    """The losses are those of the untouched script within 1e-6."""
    assert_close(work.call(losses), work.original(losses), within=1e-6)
