"""Judge a Trainer that must roll back when its data are corrupt."""

from evals_grading import Broken, Work, guard, point

IMPORTS = ("transformers",)


def outcome(corrupt, value):
    """Return validation loss and a sum of the weights with corrupt batches at these places."""
    import finetune

    whole = finetune.rows

    def rows(seed, count, is_corrupt=False):
        x, y = whole(seed, count, is_corrupt and value is None)
        return x, (y * value if is_corrupt and value is not None else y)

    finetune.CORRUPT, finetune.rows = corrupt, rows
    model = finetune.finetune()
    weights = [one.double().sum().item() for one in model.parameters()]
    return finetune.validate(model), weights


def assert_recovered(work: Work, corrupt: list[int], value: float | None = None) -> None:
    clean = work.original(outcome, [], None)[0]
    final = work.call(outcome, corrupt, value)[0]
    assert final <= 1.5 * clean, f"validation loss {final:.4f}, and {clean:.4f} on clean data"


@guard(2)
def clean_runs_stay(work: Work) -> None:
    """On clean data the trained weights are bit-equal to those of the untouched script."""
    assert work.call(outcome, [], None) == work.original(outcome, [], None), "the weights changed"


@point(3)
def recovers(work: Work) -> None:
    """With corrupt batches at three places the validation loss is that of clean data."""
    for corrupt in ([60, 61, 62, 63], [87], [50, 51, 90, 91, 92]):
        assert_recovered(work, corrupt)


@point(2)
def recovers_from_nan(work: Work) -> None:
    """The same where the corrupt batches are not finite."""
    assert_recovered(work, [70, 71], float("nan"))


@point(2)
def hopeless_data_end_in_an_error(work: Work) -> None:
    """If all data are corrupt from some step on, the script ends with an error."""
    try:
        final = work.call(outcome, list(range(60, 10_000)), None, seconds=20)[0]
    except Broken as ended:
        reason = str(ended)
    else:
        raise AssertionError(f"it returned, with a validation loss of {final:.4f}")
    assert "did not end" not in reason, reason
