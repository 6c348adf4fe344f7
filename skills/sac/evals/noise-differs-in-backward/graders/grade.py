"""Judge random numbers under selective checkpointing."""

from evals_grading import Work, flops, guard, peak_bytes, point


def losses(checkpointing):
    from net import train

    return train(checkpointing=checkpointing)


def products(checkpointing):
    from net import train

    return flops(lambda: train(checkpointing=checkpointing, steps=1))


def peak(checkpointing):
    from net import train

    return peak_bytes(lambda: train(checkpointing=checkpointing, steps=1))


@point(4)
def same_losses(work: Work) -> None:
    """The losses with checkpointing are those of the untouched script without."""
    assert work.call(losses, True) == work.original(losses, False), "the losses differ"


@guard(2)
def no_product_twice(work: Work) -> None:
    """A step computes the FLOPs of a step without checkpointing."""
    assert work.call(products, True) == work.original(products, False), "products ran twice"


@guard(2)
def less_memory(work: Work) -> None:
    """The peak is below 85% of that without checkpointing."""
    share = work.call(peak, True) / work.original(peak, False)
    assert share < 0.85, f"the peak is {share:.0%}"
