"""Judge the bytes of one rank among many, which are measured by running that rank on shapes."""

import functools
from pathlib import Path

from evals_grading import Work, guard, point

LIMIT = 1_700_000_000
RANKS = (8, 64)


def peak(ranks: int) -> int:
    """Return the most bytes alive in rank 0 during the last microbatch and the optimizer's step."""
    import torch

    from curry_train.plan.estimate import Sketch
    from curry_train.plan.parallel import Sharding
    from curry_train.workloads.workload import Workload
    from train import TOKENS, VOCABULARY, Decoder, loss_of, shard

    workload = Workload(
        "decoder",
        Decoder,
        lambda size: torch.randint(VOCABULARY, (size, TOKENS + 1)),
        loss_of,
        count=lambda rows: rows[:, 1:].numel(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True),
    )
    with Sketch(workload, sharding=Sharding(shard, mesh={"dp": ranks})) as sketch:
        return sketch.step(1, accumulated=True).peak_bytes


@functools.cache
def measured(fixture: Path, ranks: int) -> int:
    return Work(fixture, fixture).call(peak, ranks, seconds=240)


def assert_within(work: Work, share: float) -> None:
    given = work.answer()["bytes"]
    for ranks in RANKS:
        mine = given[str(ranks)]
        assert isinstance(mine, int), f"the bytes of {ranks} ranks are {mine!r}"
        required = measured(work.fixture, ranks)
        assert abs(mine - required) <= share * required, f"{mine:,}, and {required:,} are right"


@point(2)
def within_three_percent(work: Work) -> None:
    """The bytes of rank 0 are right within 3%, with 8 and with 64 ranks."""
    assert_within(work, 0.03)


@point(3)
def to_the_byte(work: Work) -> None:
    """The bytes of rank 0 are right to the byte, with 8 and with 64 ranks."""
    assert_within(work, 0)


@point(2)
def fewest_gpus(work: Work) -> None:
    """The number of GPUs is the least that stays below the limit."""
    gpus = work.answer()["gpus"]
    assert gpus in range(8, 65, 8), f"gpus is {gpus!r}"
    assert measured(work.fixture, gpus) < LIMIT, (
        f"rank 0 of {gpus} takes {measured(work.fixture, gpus):,} bytes"
    )
    assert gpus == 8 or measured(work.fixture, gpus - 8) >= LIMIT, f"{gpus - 8} are enough"


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
