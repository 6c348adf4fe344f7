"""What was measured of a model's memory: the profile of its layers, and the timeline of a training step.

A megabyte is 2**20 bytes here (MiB). Proof: `python -m pytest tests/test_profiler.py tests/test_timeline.py`.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

MEGABYTE = 2**20

PHASES = ("forward", "backward", "step")
PARAMETERS, BATCH, STATE = "parameters", "buffers and batch", "optimizer state"
GRADIENTS, ACTIVATIONS, TEMPORARIES = "gradients", "activations", "temporaries"
ALLOCATOR = "allocator"  # CUDA only: rounding, and workspaces that no storage shows
GROUPS = (PARAMETERS, BATCH, STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, ALLOCATOR)


@dataclass(frozen=True)
class LayerMemory:
    """`bytes`: storages made while the layer ran and no other one inside it, alive after forward.
    `boundary_bytes`: what stays if it is recomputed, its inputs and those of its outputs that are alive; all of
    `bytes` where `calls` is 0, because the layer is never called as a whole.
    """

    name: str
    class_name: str
    bytes: int
    boundary_bytes: int
    calls: int

    @property
    def megabytes(self) -> float:
        return self.bytes / MEGABYTE

    @property
    def saving_bytes(self) -> int:
        """What recomputing it frees; below zero where it would hold more than it frees."""
        return self.bytes - self.boundary_bytes


@dataclass(frozen=True)
class ProfileReport:
    """Layers by held bytes, most first; together they hold `held_bytes`, of which `(rest)` is what ran in no layer."""

    model: str
    device: str
    layers: tuple[LayerMemory, ...]
    held_bytes: int
    spread: float  # the widest range of one layer over the runs, as a fraction of the total
    num_runs: int

    def recommend_layers(self, memory_budget_mb: float) -> list[str]:
        """The layers to recompute, in the report's order, for the held bytes to fit the budget; none if they do.

        Greedy: as long as no single layer closes the gap, the largest saving; then the smallest one that closes it.
        Of equal ones the first, since what comes last is recomputed while the most is held.
        """
        budget = round(_positive("memory_budget_mb", memory_budget_mb) * MEGABYTE)
        gap, chosen = self.held_bytes - budget, []
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
            least = f"{(budget + gap) / MEGABYTE:.3f} MiB with all {len(chosen)} layers recomputed that save anything"
            raise ValueError(
                f"{self.model} holds {self.held_bytes / MEGABYTE:.3f} MiB after forward, and "
                f"{least if chosen else 'recomputing no layer saves anything'}: that does not fit "
                f"{memory_budget_mb:g} MiB. Use a smaller batch, name other blocks, or raise the budget"
            )
        return [layer.name for layer in self.layers if layer.name in chosen]

    def table(self, *, most: int = 20) -> str:
        """Text of at most 80 columns; layers after the first `most` are one line."""
        lines = [
            f"{self.model} on {self.device}: {self.held_bytes / MEGABYTE:.3f} MiB held after forward "
            f"({self.num_runs} runs, spread {self.spread:.1%})"[:80],
            f"{'layer':<30} {'class':<17} {'calls':>5} {'MiB':>10} {'share':>6} {'saves':>6}",
        ]
        shown, others = self.layers[:most], self.layers[most:]
        lines += [
            f"{_shorten(layer.name, 30):<30} {_shorten(layer.class_name, 17):<17} {layer.calls or '':>5} "
            f"{layer.megabytes:>10.3f} {_share(layer.bytes, self.held_bytes):>6} "
            f"{_share(max(0, layer.saving_bytes), self.held_bytes):>6}"
            for layer in shown
        ]
        if others:
            held = sum(layer.bytes for layer in others)
            saving = sum(max(0, layer.saving_bytes) for layer in others)
            lines.append(
                f"{f'{len(others)} smaller layers':<54} {held / MEGABYTE:>10.3f} {_share(held, self.held_bytes):>6} "
                f"{_share(saving, self.held_bytes):>6}"
            )
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Point:
    """Bytes alive after an operation of the step, and after each phase, when its own variables are gone."""

    index: int
    phase: str
    bytes_alive: int


@dataclass(frozen=True)
class Peak:
    """The most bytes alive, and whose they are: `owners` add up to `bytes_alive`, `layers` to the activations."""

    bytes_alive: int
    phase: str
    index: int
    owners: dict[str, int]
    layers: dict[str, int]


@dataclass(frozen=True)
class Timeline:
    """Points where the memory changed; `owners` has a figure for each of them by group, which add up to the point's.

    Temporaries are made in backward or by the optimizer, and are no gradient and no optimizer state afterwards. What
    is recomputed in backward is an activation. On CUDA the points are the allocator's.
    """

    model: str
    optimizer: str
    device: str
    num_operations: int
    points: tuple[Point, ...]
    owners: dict[str, tuple[int, ...]]
    after: dict[str, int]
    peak: Peak

    def table(self, *, most: int = 8) -> str:
        """Text of at most 80 columns: the course of the step, and the peak by owner."""
        peak, operations = self.peak, self.num_operations
        course = [f"after {phase} {self.after[phase] / MEGABYTE:.3f}" for phase in PHASES]
        lines = [
            f"one step with {self.optimizer}, MiB alive with parameters and optimizer state:",
            f"  {', '.join(course)}",
            f"  peak {peak.bytes_alive / MEGABYTE:.3f} in {peak.phase}, operation {peak.index} of {operations}",
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
    """A name that fits, its end kept, where the number of a block stands."""
    return name if len(name) <= length else f"..{name[2 - length :]}"


def _row(name: str, owned: int, whole: int) -> str:
    return f"{name:<56} {owned / MEGABYTE:>12.3f} {_share(owned, whole):>8}"
