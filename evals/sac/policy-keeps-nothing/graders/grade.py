"""Judge selective checkpointing: nothing expensive twice, less memory, the same training."""

from evals_grading import Work, flops, guard, peak_bytes, point


def products(checkpointing):
    from net import train

    return flops(lambda: train(steps=1, checkpointing=checkpointing))


def peak(checkpointing):
    from net import train

    return peak_bytes(lambda: train(steps=2, checkpointing=checkpointing))


def losses(checkpointing):
    from net import train

    return train(checkpointing=checkpointing)


@point(2)
def no_product_twice(work: Work) -> None:
    """With checkpointing a step computes the FLOPs of a step without."""
    measured, required = work.call(products, True), work.original(products, False)
    assert measured == required, f"{measured:,} FLOPs instead of {required:,}"


@guard(2)
def less_memory(work: Work) -> None:
    """The peak is below 80% of the peak without checkpointing."""
    share = work.call(peak, True) / work.original(peak, False)
    assert share < 0.8, f"the peak is {share:.0%}"


@guard(2)
def same_losses(work: Work) -> None:
    """The losses are those of the untouched script without checkpointing, to the last bit."""
    assert work.call(losses, True) == work.original(losses, False), "the losses changed"
