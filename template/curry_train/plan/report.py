"""Memory reports: the profile of a model's layers, and the timeline of a training step.

A megabyte is 2**20 bytes (MiB).

Proof: `python -m pytest tests/test_profiler.py tests/test_timeline.py`.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

MEGABYTE = 2**20

PHASES = ("forward", "backward", "step")

# Owners of bytes in a timeline.
PARAMETERS = "parameters"
BATCH = "buffers and batch"
STATE = "optimizer state"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
ALLOCATOR = "allocator"  # CUDA only: rounding, and workspaces without a storage
GROUPS = (PARAMETERS, BATCH, STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, ALLOCATOR)


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one layer holds for backward."""

    name: str
    class_name: str

    # Storages alive after forward that were made while the layer ran, and no other layer inside it.
    bytes: int

    # What remains if the layer is recomputed: its inputs, and its outputs that are alive. All of
    # `bytes` if `calls` is 0, because the layer is never called as a whole.
    boundary_bytes: int

    calls: int

    @property
    def megabytes(self) -> float:
        return self.bytes / MEGABYTE

    @property
    def saving_bytes(self) -> int:
        """Bytes that recomputing the layer frees; negative if it would hold more than before."""
        return self.bytes - self.boundary_bytes


@dataclass(frozen=True)
class ProfileReport:
    """Held bytes of each layer of a model."""

    model: str
    device: str
    layers: tuple[LayerMemory, ...]  # most bytes first; `(rest)` is what ran in no layer
    held_bytes: int  # of all layers
    spread: float  # the widest range of one layer over the runs, as a fraction of the total
    num_runs: int

    def recommend_layers(self, memory_budget_mb: float) -> list[str]:
        """Choose the layers to recompute so that the held bytes fit the budget.

        Returns names in the report's order; none if the held bytes fit already. The choice is
        greedy: take the largest saving until a single layer can close the gap, then the smallest
        saving that closes it. Of equal layers the first is taken, because the last ones would be
        recomputed while most bytes are held.
        """
        budget = round(_positive("memory_budget_mb", memory_budget_mb) * MEGABYTE)
        gap = self.held_bytes - budget
        chosen: list[str] = []
        left = sorted(
            (layer for layer in self.layers if layer.saving_bytes > 0),
            key=lambda layer: layer.saving_bytes,
        )
        while gap > 0 and left:
            enough = [layer.saving_bytes for layer in left if layer.saving_bytes >= gap]
            wanted = min(enough, default=left[-1].saving_bytes)
            layer = next(layer for layer in left if layer.saving_bytes == wanted)
            left.remove(layer)
            chosen.append(layer.name)
            gap -= layer.saving_bytes

        if gap > 0:
            least = "recomputing no layer saves anything"
            if chosen:
                least = (
                    f"{(budget + gap) / MEGABYTE:.3f} MiB with all {len(chosen)} layers recomputed "
                    "that save anything"
                )
            raise ValueError(
                f"{self.model} holds {self.held_bytes / MEGABYTE:.3f} MiB after forward, and "
                f"{least}: that does not fit {memory_budget_mb:g} MiB. Use a smaller batch, name "
                "other blocks, or raise the budget"
            )
        return [layer.name for layer in self.layers if layer.name in chosen]

    def table(self, *, most: int = 20) -> str:
        """Format the report in 80 columns; layers after the first `most` share one line."""
        title = (
            f"{self.model} on {self.device}: {self.held_bytes / MEGABYTE:.3f} MiB held after "
            f"forward ({self.num_runs} runs, spread {self.spread:.1%})"
        )
        lines = [
            title[:80],
            f"{'layer':<30} {'class':<17} {'calls':>5} {'MiB':>10} {'share':>6} {'saves':>6}",
        ]
        for layer in self.layers[:most]:
            name = _shorten(layer.name, 30)
            class_name = _shorten(layer.class_name, 17)
            lines.append(
                f"{name:<30} {class_name:<17} {layer.calls or '':>5} {layer.megabytes:>10.3f} "
                f"{_share(layer.bytes, self.held_bytes):>6} "
                f"{_share(max(0, layer.saving_bytes), self.held_bytes):>6}"
            )

        others = self.layers[most:]
        if others:
            held = sum(layer.bytes for layer in others)
            saving = sum(max(0, layer.saving_bytes) for layer in others)
            name = f"{len(others)} smaller layers"
            lines.append(
                f"{name:<54} {held / MEGABYTE:>10.3f} {_share(held, self.held_bytes):>6} "
                f"{_share(saving, self.held_bytes):>6}"
            )
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Point:
    """Bytes alive after an operation, or after a phase when its local variables are gone."""

    index: int
    phase: str
    bytes_alive: int


@dataclass(frozen=True)
class Peak:
    """The moment of a step with the most bytes alive."""

    bytes_alive: int
    phase: str
    index: int  # of the operation
    owners: dict[str, int]  # bytes by group; they add up to `bytes_alive`
    layers: dict[str, int]  # bytes by layer; they add up to the activations


@dataclass(frozen=True)
class Timeline:
    """Bytes alive through one training step, by owner.

    Temporaries are made in backward or by the optimizer, and become neither gradient nor optimizer
    state. What is recomputed in backward is an activation. On CUDA the totals are the allocator's.
    """

    model: str
    optimizer: str
    device: str
    num_operations: int
    points: tuple[Point, ...]  # where the memory changed
    owners: dict[str, tuple[int, ...]]  # bytes at each point by group; they add up to the point's
    after: dict[str, int]  # bytes alive after each phase
    peak: Peak

    def table(self, *, most: int = 8) -> str:
        """Format the bytes after each phase, and the peak by owner, in 80 columns."""
        peak = self.peak
        course = [f"after {phase} {self.after[phase] / MEGABYTE:.3f}" for phase in PHASES]
        lines = [
            f"one step with {self.optimizer}, MiB alive with parameters and optimizer state:",
            f"  {', '.join(course)}",
            f"  peak {peak.bytes_alive / MEGABYTE:.3f} in {peak.phase}, "
            f"operation {peak.index} of {self.num_operations}",
            "",
            f"{'owner at the peak':<56} {'MiB':>12} {'share':>8}",
        ]
        for group, owned in sorted(peak.owners.items(), key=lambda item: -item[1]):
            lines.append(_row(group, owned, peak.bytes_alive))
            if group == ACTIVATIONS:
                layers = sorted(peak.layers.items(), key=lambda item: -item[1])
                lines += [
                    _row(f"  {_shorten(name, 50)}", held, peak.bytes_alive)
                    for name, held in layers[:most]
                ]
                if others := layers[most:]:
                    held = sum(held for _, held in others)
                    lines.append(_row(f"  {len(others)} smaller layers", held, peak.bytes_alive))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _positive(name: str, value: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (value > 0 and math.isfinite(value))
    ):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return value


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _shorten(name: str, length: int) -> str:
    """Cut the front of a long name; the end has the number of the block."""
    return name if len(name) <= length else f"..{name[2 - length :]}"


def _row(name: str, owned: int, whole: int) -> str:
    return f"{name:<56} {owned / MEGABYTE:>12.3f} {_share(owned, whole):>8}"
