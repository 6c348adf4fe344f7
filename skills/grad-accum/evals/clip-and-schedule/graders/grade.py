"""Judge clipping and schedule under accumulation."""

from evals_grading import Work, assert_close, guard, point


def outcome(accum):
    from pretrain import pretrain

    rates, model = pretrain(accum=accum)
    return rates, [value for one in model.parameters() for value in one.flatten().tolist()]


@point(2)
def same_rates(work: Work) -> None:
    """Each optimizer step has the learning rate that it has with accum=1."""
    for accum in (2, 4):
        assert_close(work.call(outcome, accum)[0], work.original(outcome, 1)[0], within=1e-9)


@point(3)
def same_weights(work: Work) -> None:
    """The weights are those of accum=1 up to rounding."""
    required = work.original(outcome, 1)[1]
    for accum in (2, 4):
        pairs = zip(work.call(outcome, accum)[1], required, strict=True)
        furthest = max(abs(one - other) for one, other in pairs)
        assert furthest <= 1e-5, f"with accum={accum} a weight is {furthest:.1e} off"


@guard(1)
def accum_1_as_before(work: Work) -> None:
    """With accum=1 rates and weights are bit-equal to those of the untouched script."""
    assert work.call(outcome, 1) == work.original(outcome, 1), "accum=1 changed"
