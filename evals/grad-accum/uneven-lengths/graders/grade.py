"""Judge a training that must not depend on the number of accumulation steps."""

from evals_grading import Work, assert_close, guard, point


def outcome(accum):
    from train import train

    losses, model = train(accum=accum)
    weights = [value for tensor in model.parameters() for value in tensor.flatten().tolist()]
    return losses, weights[::7]


@guard(1)
def large_batch_as_before(work: Work) -> None:
    """With accum=1 the losses are those of the untouched script."""
    assert_close(work.call(outcome, 1)[0], work.original(outcome, 1)[0], within=1e-6)


@point(2)
def same_losses(work: Work) -> None:
    """With accum=2 and accum=4 each step reports the loss of accum=1."""
    required = work.original(outcome, 1)[0]
    for accum in (2, 4):
        assert_close(work.call(outcome, accum)[0], required, within=1e-4)


@point(3)
def same_weights(work: Work) -> None:
    """With accum=2 and accum=4 the weights after the epoch are those of accum=1."""
    required = work.original(outcome, 1)[1]
    for accum in (2, 4):
        measured = work.call(outcome, accum)[1]
        furthest = max(abs(one - other) for one, other in zip(measured, required, strict=True))
        assert furthest <= 1e-5, f"with accum={accum} a weight is {furthest:.1e} off"
