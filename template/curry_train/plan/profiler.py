"""Measure what each layer holds for the backward, and recommend what to recompute.

    report = MemoryProfiler(model).profile(batch, loss=loss)
    print(report.table())
    report.recommend_layers(512.0)    # names of layers, for `Recompute`

A megabyte is 2**20 bytes (MiB).

Proof: `python -m pytest tests/plan/test_profiler.py tests/plan/test_timeline.py`.
"""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.measure import LayerMemory, Loss, as_trained, divide, measure_layers, tensors_in
from ..core.wording import require_whole
from ..primitives.strategies import CheckpointConfig, apply_config, choose_largest
from ..workloads.workload import call, map_tensors

# Memory reports: the profile of a model's layers, and the timeline of a training step.

BYTES_PER_MIB = 2**20

STEP_PHASES = ("forward", "backward", "step")

# Owners of bytes in a timeline.
PARAMETERS_GROUP = "parameters"
BATCH_GROUP = "buffers and batch"
OPTIMIZER_STATE_GROUP = "optimizer state"
GRADIENTS_GROUP = "gradients"
ACTIVATIONS_GROUP = "activations"
TEMPORARIES_GROUP = "temporaries"
GATHERED_GROUP = "gathered parameters"  # of FSDP2, while they are whole
COLLECTIVES_GROUP = "collective buffers"  # what FSDP2 and DDP send and receive
ALLOCATOR_GROUP = "allocator"  # CUDA only: rounding, and workspaces without a storage
# Groups that occur only with several ranks, or only on CUDA.
SPECIAL_GROUPS = (GATHERED_GROUP, COLLECTIVES_GROUP, ALLOCATOR_GROUP)
MEMORY_GROUPS = (
    PARAMETERS_GROUP,
    BATCH_GROUP,
    OPTIMIZER_STATE_GROUP,
    GRADIENTS_GROUP,
    ACTIVATIONS_GROUP,
    TEMPORARIES_GROUP,
    *SPECIAL_GROUPS,
)


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

        Returns names in the report's order; none if the held bytes fit already. The choice is that
        of `choose_largest`.
        """
        is_number = isinstance(memory_budget_mb, int | float) and memory_budget_mb is not True
        if not is_number or not 0 < memory_budget_mb < math.inf:
            raise ValueError(f"memory_budget_mb must be a number above 0, got {memory_budget_mb!r}")
        budget = round(memory_budget_mb * BYTES_PER_MIB)
        chosen, gap = choose_largest(self.layers, self.held_bytes - budget)
        if gap > 0:
            raise ValueError(
                f"{self.model} holds {self.held_bytes / BYTES_PER_MIB:.3f} MiB after forward, and "
                f"{(budget + gap) / BYTES_PER_MIB:.3f} MiB with the {len(chosen)} layers "
                f"recomputed that save anything: that does not fit {memory_budget_mb:g} MiB. Use a "
                "smaller batch, name other blocks, or raise the budget"
            )
        return [layer.name for layer in self.layers if layer.name in chosen]

    def table(self, *, most: int = 20) -> str:
        """Format the report in 80 columns; layers after the first `most` share one line."""
        title = (
            f"{self.model} on {self.device}: {self.held_bytes / BYTES_PER_MIB:.3f} MiB held after "
            f"forward ({self.num_runs} runs, spread {self.spread:.1%})"
        )
        lines = [
            title[:80],
            f"{'layer':<30} {'class':<17} {'calls':>5} {'MiB':>10} {'share':>6} {'saves':>6}",
        ]
        for layer in self.layers[:most]:
            name = _shorten(layer.name, 30)
            lines.append(
                f"{name:<30} {_shorten(layer.class_name, 17):<17} {layer.calls or '':>5} "
                f"{layer.bytes / 2**20:>10.3f} {_share(layer.bytes, self.held_bytes):>6} "
                f"{_share(max(0, layer.saving_bytes), self.held_bytes):>6}"
            )

        others = self.layers[most:]
        if others:
            held = sum(layer.bytes for layer in others)
            saving = sum(max(0, layer.saving_bytes) for layer in others)
            name = f"{len(others)} smaller layers"
            lines.append(
                f"{name:<54} {held / BYTES_PER_MIB:>10.3f} {_share(held, self.held_bytes):>6} "
                f"{_share(saving, self.held_bytes):>6}"
            )
        return "\n".join(line.rstrip() for line in lines)


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
        course = [f"after {phase} {self.after[phase] / BYTES_PER_MIB:.3f}" for phase in STEP_PHASES]
        lines = [
            f"one step with {self.optimizer}, MiB alive with parameters and optimizer state:",
            f"  {', '.join(course)}",
            f"  peak {peak.bytes_alive / BYTES_PER_MIB:.3f} in {peak.phase}, "
            f"operation {peak.index} of {self.num_operations}",
            "",
            f"{'owner at the peak':<56} {'MiB':>12} {'share':>8}",
        ]
        for group, owned in Counter(peak.owners).most_common():
            lines.append(_row(group, owned, peak.bytes_alive))
            if group == ACTIVATIONS_GROUP:
                layers = Counter(peak.layers).most_common()
                lines += [
                    _row(f"  {_shorten(name, 50)}", held, peak.bytes_alive)
                    for name, held in layers[:most]
                ]
                if others := layers[most:]:
                    held = sum(held for _, held in others)
                    lines.append(_row(f"  {len(others)} smaller layers", held, peak.bytes_alive))
        return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _shorten(name: str, length: int) -> str:
    """Cut the front of a long name; the end has the number of the block."""
    return name if len(name) <= length else f"..{name[2 - length :]}"


def _row(name: str, owned: int, whole: int) -> str:
    return f"{name:<56} {owned / BYTES_PER_MIB:>12.3f} {_share(owned, whole):>8}"


# Profile the bytes that each layer holds for backward, and choose layers to recompute.


class MemoryProfiler:
    """Profile a model on its own device.

    `device` is the device that you expect it on; another one raises an error.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        self.device = _device_of(model, device)
        self.model = model
        self.report: ProfileReport | None = None

    def profile(
        self,
        sample_input: Any,
        num_runs: int = 3,
        *,
        loss: Loss | None = None,
        blocks: str | Sequence[str] | None = None,
    ) -> ProfileReport:
        """Report what each layer holds after forward, in the median of `num_runs` runs.

        `sample_input` is a tensor, positional arguments in a tuple or list, or keywords in a
        mapping. Without `loss` the sum of the output is used. `blocks` is a glob over module names;
        by default the layers are the repeated blocks and the modules around them. The model runs in
        training mode after a warm-up. Its mode, its buffers and every generator are restored, and
        gradients are not touched.
        """
        require_whole("num_runs", num_runs, least=1)
        sample = map_tensors(sample_input, lambda tensor: tensor.to(self.device))
        layers = divide(self.model, blocks=blocks)
        checked = functools.partial(_forward, loss=loss or sum_of_output)
        with as_trained(self.model):
            # The first run fills caches and allocates workspaces, which stay.
            _, *runs = (
                measure_layers(self.model, sample, checked, layers) for _ in range(1 + num_runs)
            )

        totals = [_bytes_of_layers(run) for run in runs]
        median = runs[totals.index(statistics.median_low(totals))]
        ranges = []
        for same_layer in zip(*runs, strict=True):
            held = [layer.bytes for layer in same_layer]
            ranges.append(max(held) - min(held))
        total = _bytes_of_layers(median)
        self.report = ProfileReport(
            model=type(self.model).__name__,
            device=str(self.device),
            layers=tuple(sorted(median, key=lambda layer: -layer.bytes)),
            held_bytes=total,
            spread=max(*ranges, max(totals) - min(totals)) / max(total, 1),
            num_runs=num_runs,
        )
        return self.report

    def recommend_layers(self, memory_budget_mb: float) -> list[str]:
        """Call `ProfileReport.recommend_layers` of the latest report."""
        if self.report is None:
            raise ValueError("there is no report yet: call profile(sample_input) first")
        return self.report.recommend_layers(memory_budget_mb)


def _bytes_of_layers(layers: Sequence[LayerMemory]) -> int:
    return sum(layer.bytes for layer in layers)


def _forward(model: nn.Module, sample: Any, *, loss: Loss) -> Tensor:
    try:
        value = loss(model, sample)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the user's model may raise anything
        raise ValueError(
            f"a forward of {type(model).__name__} on the sample raised {type(error).__name__}: "
            f"{error}. Give a tensor, positional arguments as a tuple, or keywords as a mapping"
        ) from error
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise ValueError(
            f"the loss of {type(model).__name__} depends on no parameter that requires grad: "
            f"{value!r}"
        )
    return value


def sum_of_output(model: nn.Module, sample: Any) -> Tensor:
    """Stand in for a loss: the sum of all outputs of the model that require grad."""
    sums = [
        tensor.sum().float() for tensor in tensors_in(call(model, sample)) if tensor.requires_grad
    ]
    return torch.stack(sums).sum() if len(sums) != 1 else sums[0]


def trained_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters that require grad; raise ValueError if there are none."""
    trained: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
    if not trained:
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires grad: there is nothing to train"
        )
    return trained


def _device_of(model: nn.Module, expected: torch.device | str | None) -> torch.device:
    device = trained_parameters(model)[0].device
    if expected is not None and torch.device(expected).type != device.type:
        raise ValueError(
            f"the model is on {device}, not on {expected}: move it first with "
            f"model.to({str(expected)!r})"
        )
    return device


# Apply a `CheckpointConfig` with what this room measures and loads: profiles and plan files.


@dataclass
class SelectiveCheckpointer:
    """Choose the layers that a configuration selects, and recompute them."""

    config: CheckpointConfig
    profiler: MemoryProfiler | None = None
    _layers: Sequence[str] = field(default=(), init=False)

    def apply(
        self,
        model: nn.Module,
        profile_report: ProfileReport | None = None,
        *,
        batch: Any = None,
        loss: Loss | None = None,
    ) -> nn.Module:
        """Apply the configuration to a model in place, and return the model.

        Call it before DDP, `fully_shard` and `torch.compile`. What has to be measured first (the
        profile of `selective`, the count of segments) is measured on `batch`.
        """
        config = self.config
        self._layers = []
        if not config.enabled:
            return model

        applies_strategy = not config.snn_timestep_checkpoint
        report = profile_report
        # Without a batch it is refused, with the advice to give one.
        measures = config.profile_before_apply and batch is not None
        if config.strategy == "selective" and applies_strategy and report is None and measures:
            profiler = self.profiler or MemoryProfiler(model)
            report = profiler.profile(batch, config.profile_num_runs, loss=loss)
        plan = None
        if config.plan is not None and applies_strategy:
            # Imported here because most configurations name no plan.
            from .saved import Plan

            plan = Plan.load(config.plan)
        # Counts of segments are measured with the loss that is trained, or not at all.
        measures_sum = loss is None and config.strategy != "sequential"
        self._layers = apply_config(
            model,
            config,
            batch=batch,
            loss=sum_of_output if measures_sum else loss,
            layers=None if report is None else report.layers,
            apply_plan=None if plan is None else plan.apply,
        )
        return model

    def get_checkpointed_layers(self) -> list[str]:
        """Return the layers that the last `apply` changed."""
        return list(self._layers)
