"""Judge the longest rows that fit a card, by what training steps reserve."""

from functools import cache, partial
from pathlib import Path

from evals_grading import Work, assert_figures, assert_largest, guard, point

CARD_MIB, STEP, ROWS = 21_850, 64, 4


def reserved_by(tokens: int) -> float:
    import train
    from curry_train.plan.cuda_step import cuda_memory
    from curry_train.plan.estimate import Sketch
    from curry_train.workloads.workload import Workload

    workload = Workload(
        "train",
        partial(train.build, tokens),
        lambda rows: train.batch(tokens),
        lambda model, batch: train.loss_of(model(*batch[:2]), batch[2]),
        count=lambda batch: 1,
        optimizer=train.make_optimizer,
    )
    with Sketch(workload, kernels="cuda") as sketch:
        step = sketch.step(ROWS)
    assert step.trace is not None, sketch.why_real
    return cuda_memory(step.trace).reserved_bytes / 2**20


@cache
def reserved(fixture: Path, tokens: int) -> float:
    return float(Work(fixture, fixture).call(reserved_by, tokens))


@point(5)
def the_largest_that_fits(work: Work) -> None:
    """Rows of so many tokens fit the card, and 64 more do not."""
    tokens = work.answer()["tokens"]
    assert isinstance(tokens, int), f"it is {tokens!r}"
    assert tokens % STEP == 0, f"{tokens} is no multiple of {STEP}"
    assert_largest(
        tokens,
        lambda number: reserved(work.fixture, number),
        card=CARD_MIB,
        step=STEP,
        most=8192,
    )


@point(3)
def reserved_memory(work: Work) -> None:
    """Of the right number, the reserved memory is right within 2%."""
    the_largest_that_fits(work)
    given = work.answer()
    right = reserved(work.fixture, given["tokens"])
    assert_figures(given, {"reserved_mib": right}, within=0.02)


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
