"""Judge the bytes of one rank of several meshes, which are measured by running it on shapes."""

import functools
from pathlib import Path

from evals_grading import Work, guard, point

LIMIT = 1_340_000_000
MESHES = ("32x2", "16x4", "8x8")  # with the least tensor parallelism first


def peak(dp: int, tp: int) -> int:
    """Return the most bytes alive in rank 0 during a step."""
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
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False),
    )
    with Sketch(workload, sharding=Sharding(shard, mesh={"dp": dp, "tp": tp})) as sketch:
        return sketch.step(1).peak_bytes


@functools.cache
def measured(fixture: Path, mesh: str) -> int:
    return Work(fixture, fixture).call(peak, *map(int, mesh.split("x")), seconds=240)


def assert_within(work: Work, share: float) -> None:
    given = work.answer()["bytes"]
    for mesh in MESHES:
        mine = given[mesh]
        assert isinstance(mine, int), f"the bytes of {mesh} are {mine!r}"
        required = measured(work.fixture, mesh)
        assert abs(mine - required) <= share * required, f"{mine:,}, and {required:,} are right"


@point(2)
def within_two_percent(work: Work) -> None:
    """The bytes of rank 0 are right within 2% in each mesh."""
    assert_within(work, 0.02)


@point(3)
def to_the_byte(work: Work) -> None:
    """The bytes of rank 0 are right to the byte in each mesh."""
    assert_within(work, 0)


@point(2)
def mesh_fits(work: Work) -> None:
    """The named mesh is the first that stays below the limit."""
    mesh = work.answer()["mesh"]
    assert mesh in MESHES, f"mesh is {mesh!r}"
    assert measured(work.fixture, mesh) < LIMIT, (
        f"rank 0 of {mesh} takes {measured(work.fixture, mesh):,} bytes"
    )
    before = MESHES[: MESHES.index(mesh)]
    assert all(measured(work.fixture, one) >= LIMIT for one in before), (
        "less tensor parallelism is enough"
    )


@guard(1)
def train_is_unchanged(work: Work) -> None:
    """train.py is untouched."""
    work.assert_unchanged("train.py")
