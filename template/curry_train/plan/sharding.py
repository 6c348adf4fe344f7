"""What several ranks change in the bytes of one of them, by arithmetic.

DDP keeps every gradient a second time, in its buckets. FSDP2 keeps a rank's part of parameters, gradients and optimizer
state, and whole only what runs: the block that runs and the next one with their gradients, and what is beside the
blocks, whose gradients are divided at the end. Not yet measured on several GPUs. Proof:
`python -m pytest tests/test_plan.py`.
"""

from dataclasses import dataclass

from .estimate import StepEstimate
from .report import BATCH, GRADIENTS, PARAMETERS

KINDS = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Sharding:
    """`ranks` processes that share one training; one rank shares nothing."""

    kind: str | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, int) or self.ranks < 1:
            raise ValueError(f"ranks must be a whole number of at least 1, got {self.ranks!r}")
        if self.kind not in (None, *KINDS):
            raise ValueError(f"parallel must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.ranks > 1 and self.kind is None:
            raise ValueError(
                f"{self.ranks} ranks: say how they share the training, with parallel {' or '.join(KINDS)}"
            )

    def microbatches(
        self, global_batch: int, microbatch: int | None = None
    ) -> list[tuple[int, int]]:
        """The sizes that a rank's samples can be divided into, or only this one, and how many of them there are."""
        if global_batch % self.ranks:
            raise ValueError(
                f"a global batch of {global_batch} can't be shared by {self.ranks} ranks: use a multiple of that"
            )
        own = global_batch // self.ranks
        sizes = [size for size in range(1, own + 1) if own % size == 0]
        if microbatch is None:
            return [(size, own // size) for size in sizes]
        if microbatch not in sizes:
            shown = ", ".join(map(str, sizes[:12])) + (", ..." if len(sizes) > 12 else "")
            raise ValueError(
                f"microbatch {microbatch} does not divide the {own} samples of a rank: use one of {shown}"
            )
        return [(microbatch, own // microbatch)]

    def extra_bytes(self, step: StepEstimate, *, accumulated: bool) -> int:
        """What a rank has at its peak beside what it would have alone; below zero where it has less.

        Without a sync FSDP2 keeps whole gradients, so windows of several microsteps have them whole.
        """
        if self.ranks == 1 or self.kind is None:
            return 0
        if self.kind == "ddp":
            return step.gradients
        part, owners, blocks = 1 - 1 / self.ranks, step.timeline.owners, step.blocks.values()
        beside = owners[PARAMETERS][0] - sum(block.parameters for block in blocks)
        largest = max((block.parameters + block.gradients for block in blocks), default=0)
        at_the_end = step.gradients - sum(
            block.gradients for block in blocks
        )  # those of what is beside the blocks
        peak = max(
            point.bytes_alive - (0 if accumulated else part * max(0, gradients - at_the_end))
            for point, gradients in zip(step.timeline.points, owners[GRADIENTS], strict=True)
        )
        kept = step.fixed - owners[BATCH][0]
        return round(beside + 2 * largest - part * kept + peak) - step.peak_bytes
