"""Judge less memory for a model whose source must stay."""

from evals_grading import Work, guard, peak_bytes, point


def losses():
    from run import train

    return train()


def peak():
    from run import train

    return peak_bytes(lambda: train(steps=1))


def names():
    from run import build

    return sorted(build().state_dict())


@point(4)
def half_the_memory(work: Work) -> None:
    """The peak of a step is below half of what it was."""
    share = work.call(peak) / work.original(peak)
    assert share < 0.5, f"the peak is {share:.0%}"


@guard(2)
def same_losses(work: Work) -> None:
    """The losses are bit-equal."""
    assert work.call(losses) == work.original(losses), "the losses changed"


@guard(2)
def vendor_untouched(work: Work) -> None:
    """No file of vendor/ was changed."""
    work.assert_unchanged("vendor/texty.py", "vendor/__init__.py")


@guard(2)
def same_names(work: Work) -> None:
    """The state dict has the same names."""
    assert work.call(names) == work.original(names), "the names changed"
