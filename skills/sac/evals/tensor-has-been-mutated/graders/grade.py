"""Judge selective checkpointing of a block that overwrote a kept output."""

from evals_grading import Work, guard, peak_bytes, point


def losses(checkpointing):
    from net import train

    return train(checkpointing=checkpointing)


def peak(checkpointing):
    from net import train

    return peak_bytes(lambda: train(checkpointing=checkpointing, steps=1))


@point(1)
def runs(work: Work) -> None:
    """Training with checkpointing ends without an error, at a finite loss."""
    assert work.call(losses, True)[-1] < 100


@point(4)
def same_losses(work: Work) -> None:
    """The losses are those of the untouched script without checkpointing."""
    assert work.call(losses, True) == work.original(losses, False), "the losses differ"


@guard(3)
def less_memory(work: Work) -> None:
    """The peak is at most 85% of that without checkpointing."""
    share = work.call(peak, True) / work.original(peak, False)
    assert share <= 0.85, f"the peak is {share:.0%}"
