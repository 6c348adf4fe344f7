"""Judge a training that must recover from corrupt batches."""

from evals_grading import Broken, Work, guard, point

STEPS = 120


def outcome(places, value):
    import data
    from train import train

    data.CORRUPT = places
    if value is not None:
        whole = data.batch

        def batch(step):
            x, y = whole(step)
            return x, (y * value if step in places else y)

        data.CORRUPT, data.batch = [], batch
    losses, final = train(STEPS)
    return losses, final


def assert_recovered(work: Work, places: list[int], value: float | None = None) -> None:
    clean = work.original(outcome, [], None)[1]
    final = work.call(outcome, places, value)[1]
    assert final <= 2 * clean, f"validation loss {final:.4f}, and {clean:.4f} on clean data"


@guard(2)
def clean_runs_stay(work: Work) -> None:
    """On clean data losses and validation loss are bit-equal to those of the untouched script."""
    assert work.call(outcome, [], None) == work.original(outcome, [], None), "the losses changed"


@point(3)
def recovers(work: Work) -> None:
    """With the corrupt batches of data.py the validation loss is that of clean data."""
    assert_recovered(work, [60, 61, 62, 63])


@point(2)
def recovers_elsewhere(work: Work) -> None:
    """The same with corrupt batches at other steps, and with two places."""
    assert_recovered(work, [87])
    assert_recovered(work, [50, 51, 90, 91, 92])


@point(1)
def recovers_from_nan(work: Work) -> None:
    """The same where the corrupt batches are not finite."""
    assert_recovered(work, [70, 71], float("nan"))


@point(1)
def hopeless_data_end_in_an_error(work: Work) -> None:
    """If all data are corrupt from some step on, the script ends with an error."""
    try:
        result = work.call(outcome, list(range(60, 10_000)), None, seconds=20)
    except Broken as ended:
        reason = str(ended)
    else:
        raise AssertionError(f"it returned a validation loss of {result[1]:.4f}")
    assert "did not end" not in reason, reason
