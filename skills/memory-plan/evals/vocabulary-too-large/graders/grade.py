"""Judge the memory of a step whose logits are large."""

from evals_grading import Work, assert_close, guard, peak_bytes, point


def peak():
    from lm import train

    return peak_bytes(lambda: train(steps=1))


def losses():
    from lm import train

    return train(steps=3)


def names():
    from lm import LM

    return {name: list(one.shape) for name, one in LM().named_parameters()}


@point(5)
def peak_is_low(work: Work) -> None:
    """The peak is below 40% of what it was."""
    share = work.call(peak) / work.original(peak)
    assert share < 0.4, f"the peak is {share:.0%}"


@guard(3)
def same_losses(work: Work) -> None:
    """The losses are the same within 1e-5."""
    assert_close(work.call(losses), work.original(losses), within=1e-5)


@guard(1)
def same_parameters(work: Work) -> None:
    """Names and shapes of the parameters are the same."""
    assert work.call(names) == work.original(names), "the parameters changed"
