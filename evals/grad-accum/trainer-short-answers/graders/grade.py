"""Judge accumulation under the Trainer of Hugging Face."""

import warnings

from evals_grading import Work, guard, point

IMPORTS = ("transformers.trainer",)  # in seconds; once for all forks


def weights(batch, accum):
    warnings.simplefilter("ignore")
    from finetune import finetune

    model = finetune(batch=batch, accum=accum)
    return [value for one in model.parameters() for value in one.flatten().tolist()]


def furthest(measured, required):
    return max(abs(one - other) for one, other in zip(measured, required, strict=True))


@point(4)
def same_weights(work: Work) -> None:
    """With batch=2 and accum=4, and with 4 and 2, the weights are those of batch=8."""
    required = work.original(weights, 8, 1)
    for batch, accum in ((2, 4), (4, 2)):
        off = furthest(work.call(weights, batch, accum), required)
        assert off <= 1e-5, f"with batch={batch} and accum={accum} a weight is {off:.1e} off"


@guard(2)
def large_batch_as_before(work: Work) -> None:
    """With batch=8 and accum=1 the weights are as before, up to rounding."""
    off = furthest(work.call(weights, 8, 1), work.original(weights, 8, 1))
    assert off <= 1e-6, f"a weight is {off:.1e} off"


@guard(1)
def trainer_stays(work: Work) -> None:
    """The Trainer still trains."""
    assert "Trainer(" in (work.folder / "finetune.py").read_text(), "it is gone"
