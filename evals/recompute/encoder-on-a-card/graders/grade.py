"""Judge which blocks of an encoder are recomputed: a step fits, and computes little again."""

from functools import cache
from pathlib import Path

from evals_grading import Work, guard, point

ROWS, CARD_MIB = 5, 10_500
PLAIN_FLOPS = 13.831e12  # of a step that recomputes nothing


def step_of() -> dict[str, float]:
    import train
    from curry_train.plan.cuda_step import cuda_memory
    from curry_train.plan.estimate import Sketch
    from curry_train.workloads.workload import Workload

    workload = Workload(
        "train",
        train.build,
        train.batch,
        lambda model, batch: train.loss_of(model(*batch[:2]), batch[2]),
        count=lambda batch: 1,
        optimizer=train.make_optimizer,
    )
    with Sketch(workload, kernels="cuda") as sketch:
        step = sketch.step(ROWS)
    assert step.trace is not None, sketch.why_real
    reserved = cuda_memory(step.trace).reserved_bytes / 2**20
    return {"reserved": reserved, "flops": float(step.flops.sum())}


@cache
def measured(folder: Path) -> dict[str, float]:
    return Work(folder, folder).call(step_of)


@point(3)
def fits(work: Work) -> None:
    """Training steps reserve at most 10,500 MiB."""
    reserved = measured(work.folder)["reserved"]
    assert reserved <= CARD_MIB, f"{reserved:,.0f} MiB"


@point(4)
def little_is_recomputed(work: Work) -> None:
    """It fits, and a step has at most 18% more FLOPs than without recomputation."""
    fits(work)
    share = measured(work.folder)["flops"] / PLAIN_FLOPS
    assert share <= 1.18, f"{share:.3f} times the FLOPs"


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
