"""Judge an accumulation that meets microbatches of padding and broken features."""

from evals_grading import Work, guard, point


def weights(padding):
    """Train with padding-only microbatches put in at these places, three to a window."""
    import tagger

    micro = tagger.microbatches(12)
    windows = [micro[start : start + 3] for start in range(0, 12, 3)]
    for number in padding:
        x, y = windows[number][0]
        windows[number].insert(1, (x + 1, 0 * y + tagger.PAD))
    accum = 4 if padding else 3
    model = tagger.train([one for window in windows for one in window], accum)
    return [value for one in model.parameters() for value in one.flatten().tolist()]


def broken(value):
    """Train with a broken feature in microbatch 6; return the message and the weights."""
    import tagger

    micro = tagger.microbatches(12)
    micro[6][0][0, 0, 0] = value
    message = ""
    try:
        tagger.train(micro, 4)
    except Exception as error:  # noqa: BLE001 - any error will do, if it names the place
        message = str(error)
    finite = all(one.isfinite().all().item() for one in tagger.MODEL.parameters())
    return message, finite


@point(3)
def padding_counts_for_nothing(work: Work) -> None:
    """With a padding-only microbatch in each window the weights are those without it."""
    required = work.original(weights, [])
    measured = work.call(weights, [0, 1, 2, 3])
    furthest = max(abs(one - other) for one, other in zip(measured, required, strict=True))
    assert furthest <= 1e-6, f"a weight is {furthest:.1e} off"


@point(2)
def broken_features_are_an_error(work: Work) -> None:
    """NaN in the features of microbatch 6 raises an error that names 6, and weights stay finite."""
    message, finite = work.call(broken, float("nan"))
    assert message, "no error was raised"
    assert finite, "the weights are not finite"
    assert any(number in message for number in ("6", "7", "2")), f"no microbatch in: {message}"


@guard(1)
def healthy_as_before(work: Work) -> None:
    """Without padding-only microbatches the weights are as before, up to rounding."""
    pairs = zip(work.call(weights, []), work.original(weights, []), strict=True)
    assert max(abs(one - other) for one, other in pairs) <= 1e-6, "the training changed"
