"""Sharding: predict by arithmetic how DDP and FSDP2 change the bytes of one rank.

DDP keeps every gradient a second time, in its buckets. FSDP2 keeps a rank's shard of parameters,
gradients and optimizer state. Whole are only the block that runs and the next one, with their
gradients, and the modules outside the blocks, whose gradients are sharded at the end. Not yet
measured on several GPUs.

Proof: `python -m pytest tests/test_plan.py`.
"""

from dataclasses import dataclass

from .estimate import StepEstimate
from .report import BATCH, GRADIENTS, PARAMETERS

KINDS = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Sharding:
    """How the ranks share one training; one rank shares nothing."""

    kind: str | None = None  # ddp or fsdp2
    ranks: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, int) or self.ranks < 1:
            raise ValueError(f"ranks must be a whole number of at least 1, got {self.ranks!r}")
        if self.kind not in (None, *KINDS):
            raise ValueError(f"parallel must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.ranks > 1 and self.kind is None:
            raise ValueError(
                f"{self.ranks} ranks need a way to share the training: set parallel to "
                f"{' or '.join(KINDS)}"
            )

    def microbatches(
        self, global_batch: int, microbatch: int | None = None
    ) -> list[tuple[int, int]]:
        """List pairs of microbatch size and number of microbatches for a rank's samples.

        With `microbatch` only that size is listed.
        """
        if global_batch % self.ranks:
            raise ValueError(
                f"a global batch of {global_batch} can't be shared by {self.ranks} ranks: "
                f"use a multiple of {self.ranks}"
            )
        own = global_batch // self.ranks
        sizes = [size for size in range(1, own + 1) if own % size == 0]
        if microbatch is None:
            return [(size, own // size) for size in sizes]
        if microbatch not in sizes:
            shown = ", ".join(map(str, sizes[:12])) + (", ..." if len(sizes) > 12 else "")
            raise ValueError(
                f"microbatch {microbatch} does not divide the {own} samples of a rank: "
                f"use one of {shown}"
            )
        return [(microbatch, own // microbatch)]

    def extra_bytes(self, step: StepEstimate, *, accumulated: bool) -> int:
        """Return how much the peak of a rank grows over a single rank's; negative if it shrinks.

        FSDP2 without a gradient sync keeps gradients whole, so a window of several microbatches
        (`accumulated`) has them whole.
        """
        if self.ranks == 1 or self.kind is None:
            return 0
        if self.kind == "ddp":
            return step.gradients

        owners = step.timeline.owners
        blocks = step.blocks.values()
        elsewhere = 1 - 1 / self.ranks  # fraction of a sharded tensor that other ranks hold

        outside_parameters = owners[PARAMETERS][0] - sum(block.parameters for block in blocks)
        outside_gradients = step.gradients - sum(block.gradients for block in blocks)
        largest = max((block.parameters + block.gradients for block in blocks), default=0)
        totals = []
        for point, gradients in zip(step.timeline.points, owners[GRADIENTS], strict=True):
            sharded = 0 if accumulated else elsewhere * max(0, gradients - outside_gradients)
            totals.append(point.bytes_alive - sharded)
        fixed = step.fixed - owners[BATCH][0]
        peak = outside_parameters + 2 * largest - elsewhere * fixed + max(totals)
        return round(peak) - step.peak_bytes
