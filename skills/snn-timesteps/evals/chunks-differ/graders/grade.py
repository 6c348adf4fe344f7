"""Judge chunks of a loop over time whose neurons have a potential."""

from evals_grading import Work, guard, peak_bytes, point


def losses(chunk):
    from lif import train

    return train(chunk=chunk)


def peak(chunk):
    from lif import train

    return peak_bytes(lambda: train(chunk=chunk, steps=1))


@point(4)
def same_losses(work: Work) -> None:
    """With chunks of 8 and of 5 the losses are those of the untouched loop."""
    required = work.original(losses, None)
    for chunk in (8, 5):
        assert work.call(losses, chunk) == required, f"with chunk={chunk} the losses differ"


@guard(3)
def less_memory(work: Work) -> None:
    """With chunks of 8 the peak is below half of that of the untouched loop."""
    share = work.call(peak, 8) / work.original(peak, None)
    assert share < 0.5, f"the peak is {share:.0%}"


@guard(1)
def plain_loop_as_before(work: Work) -> None:
    """Without chunks the losses are as before."""
    assert work.call(losses, None) == work.original(losses, None), "the losses changed"
