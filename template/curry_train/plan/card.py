"""Predict how much memory a step needs on a device, and how much of it is there for the step.

    card = Card(find_profile("h100"), margin=0.019)
    card.bytes_needed(sketch.step(4)) <= card.limit()[0]

Proof: `python -m pytest tests/plan/test_plan.py tests/plan/test_fewest.py`.
"""

from dataclasses import dataclass

from ..core.wording import format_bytes
from .cuda_step import CONTEXT_BYTES, CUDNN_BYTES, CudaMemory, StepTrace, cuda_memory, workspace_of
from .device import DeviceProfile
from .estimate import StepEstimate

# No reserved peak of a recorded CUDA program is off by more: evidence/cuda_memory.json has 1.82%.
WORST_RESERVED_ERROR = 0.019


@dataclass(frozen=True)
class Card:
    """A device to plan for; on the CPU a step needs its tensors alone."""

    profile: DeviceProfile

    # Measured memory of a process besides its tensors; None for the usual one.
    context_bytes: int | None = None

    # The fraction by which a step may need more than predicted.
    margin: float = 0.0

    # Whether a step on a GPU needs what the allocator reserves, and not its tensors alone.
    by_reserved: bool = True

    @property
    def kernels(self) -> str:
        """The kind of device whose kernels a step runs."""
        return "cpu" if self.profile.host_bytes_per_second is None else "cuda"

    def trace_of(self, step: StepEstimate) -> StepTrace | None:
        """Return what a step reserves memory for; None where its tensors alone count."""
        return step.trace if self.by_reserved else None

    def memory(self, trace: StepTrace, *, expandable: bool = False) -> CudaMemory:
        """Replay the steps of a trace in the allocator of the device."""
        workspace = workspace_of(self.profile.name)
        return cuda_memory(trace, workspace_bytes=workspace, expandable=expandable)

    def context(self, trace: StepTrace | None) -> int:
        """Return the bytes of a process besides its tensors: as measured, or as usual."""
        if trace is None:
            return 0
        if self.context_bytes is not None:
            return self.context_bytes
        return CONTEXT_BYTES + (CUDNN_BYTES if trace.convolutions else 0)

    def bytes_needed(self, step: StepEstimate) -> int:
        """Return the memory that the device must have for a step."""
        trace = self.trace_of(step)
        if trace is None:
            return step.peak_bytes
        return max(step.peak_bytes, self.memory(trace).reserved_bytes) + self.context(trace)

    def limit(self, budget_bytes: int | None = None) -> tuple[int, list[str]]:
        """Return the memory that a step may need, and what of the budget that leaves free."""
        usable = self.profile.usable_bytes
        within = min(size for size in (usable, budget_bytes) if size is not None)
        limit = within
        if self.kernels == "cuda" and self.by_reserved:
            limit = int(within / (1 + self.margin))
        notes = []
        if budget_bytes is not None and within < budget_bytes:
            notes.append(f"{format_bytes(within)} of the card that CUDA gives")
        if limit < within:
            notes.append(f"a margin of {self.margin:.1%}")
        return limit, notes
