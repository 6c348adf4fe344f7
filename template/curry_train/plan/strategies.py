"""The registry of strategies: each way to use less memory, by name, with its options.

Every command lists the strategies in this registry. A module `plan/*_strategies.py` registers its
own in a tuple `FOUND`, so a project with only some techniques has only their strategies.

Proof: `python -m pytest tests/gates tests/primitives`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import primitives
from ..core.blocks import find_blocks, match_names
from ..core.measure import Loss, measure_memory
from ..core.measure_compiled import CompileFailed
from ..primitives.offload import NothingToMove, offload_blocks, offload_report
from ..primitives.recompute import (
    CheckpointConfig,
    choose_segments,
    recompute_blocks,
    recompute_segments,
)
from ..primitives.regions import apply_regions, remove_regions
from ..primitives.sac import apply_sac
from ..primitives.snn_timesteps import recompute_timesteps
from .profiler import MemoryProfiler, ProfileReport, sum_of_output

# ------------------------------------------------------------------------------
# Strategy: a named way to use less memory, with a function that applies it to a model.
# ------------------------------------------------------------------------------



@dataclass(frozen=True)
class Sample:
    """Inputs that a strategy may use to measure a model before it chooses."""

    batch: Any
    loss: Loss
    blocks: str | Sequence[str] | None = None  # names or globs; None for the repeated blocks


Apply = Callable[[nn.Module, Sample], list[str]]


@dataclass(frozen=True)
class Strategy:
    """A named way to use less memory."""

    name: str
    summary: str  # one line for the commands

    # Changes a model in place, and returns the names of the modules that it changed.
    apply: Apply

    # Returns extra figures, such as bytes moved, of a changed model that has run a step.
    facts: Callable[[nn.Module], dict[str, float]] | None = None


# ------------------------------------------------------------------------------
# Registry of strategies: every way to use less memory that this project has, by name.
# ------------------------------------------------------------------------------


# ------------------------------------------------------------------------------
# Strategy of the technique `memory-budget`: the compiler chooses what to recompute.
# ------------------------------------------------------------------------------

MEMORY_BUDGET_SHARE = 0.5  # of the bytes that compiled code saves for backward


def _memory_budget(model: nn.Module, sample: Sample) -> list[str]:
    # Imported here because this imports the compiler, which takes seconds.
    from ..primitives.compile_budget import memory_budget

    cuda = any(parameter.device.type == "cuda" for parameter in model.parameters())
    options: dict[str, Any] = {
        "blocks": sample.blocks,
        "backend": "inductor" if cuda else "aot_eager",
    }
    if sample.batch is not None:
        options |= {"batch": sample.batch, "loss": sample.loss}
    try:
        return memory_budget(model, MEMORY_BUDGET_SHARE, **options)
    except CompileFailed as failure:
        raise ValueError(str(failure)) from failure


MEMORY_BUDGET_STRATEGIES = (
    Strategy(
        "memory_budget", "compiled, half of the saved bytes (aot_eager on CPU)", _memory_budget
    ),
)


# ------------------------------------------------------------------------------
# Strategies that offload the activations of blocks to host memory.
# ------------------------------------------------------------------------------


def offload(model: nn.Module, sample: Sample) -> list[str]:
    """Offload all blocks but the last; a single block is offloaded itself."""
    several = len(find_blocks(model, sample.blocks)) > 1
    return offload_blocks(
        model,
        blocks=sample.blocks,
        keep_last=1 if several else 0,
        batch=sample.batch,
        loss=sample.loss,
    )


def offload_one(model: nn.Module, sample: Sample) -> list[str]:
    """Offload all blocks, the last one too; return no names if they hold nothing to move."""
    try:
        return offload_blocks(
            model, blocks=sample.blocks, keep_last=0, batch=sample.batch, loss=sample.loss
        )
    except NothingToMove:
        return []


def moved(model: nn.Module) -> dict[str, float]:
    """Report the bytes that the last step moved, next to what `save_on_cpu` would have copied.

    `save_on_cpu` copies every tensor that autograd saves in the blocks.
    """
    report = offload_report(model)
    everything = report.moved_bytes + sum(nbytes for _, nbytes in report.skipped.values())
    return {
        "moved_bytes": report.moved_bytes,
        "brought_back_bytes": report.brought_back_bytes,
        "host_bytes": report.reserved_bytes,
        "save_on_cpu_bytes": everything,
        "of_save_on_cpu": report.moved_bytes / everything if everything else 0.0,
    }


OFFLOAD_STRATEGIES = (
    Strategy("offload", "move what the blocks hold to CPU memory", offload, moved),
)


# ------------------------------------------------------------------------------
# Strategies of the technique `recompute`: none, full, sequential and selective.
# ------------------------------------------------------------------------------

# Fraction of the held bytes to keep, for the example in the commands; users set a threshold or a
# budget instead.
SELECTIVE_SHARE = 0.6


def _none(model: nn.Module, sample: Sample) -> list[str]:
    return []


def _full(model: nn.Module, sample: Sample) -> list[str]:
    return recompute_blocks(model, blocks=sample.blocks)


def _sequential(model: nn.Module, sample: Sample) -> list[str]:
    count = choose_segments(model, sample.batch, sample.loss, blocks=sample.blocks)
    return recompute_segments(model, count, blocks=sample.blocks)


def _selective(model: nn.Module, sample: Sample) -> list[str]:
    report = MemoryProfiler(model).profile(sample.batch, 1, loss=sample.loss, blocks=sample.blocks)
    savings = sum(max(0, layer.bytes - layer.boundary_bytes) for layer in report.layers)
    target = max(SELECTIVE_SHARE * report.held_bytes, report.held_bytes - savings)
    names = report.recommend_layers((target + 1) / 2**20) if savings else []
    return recompute_blocks(model, blocks=names) if names else []


RECOMPUTE_STRATEGIES = (
    Strategy("none", "keep every activation", _none),
    Strategy("full", "recompute every block", _full),
    Strategy("sequential", "recompute runs of blocks, the count with the lowest peak", _sequential),
    Strategy(
        "selective", "recompute the largest blocks until 60% of the bytes are held", _selective
    ),
)


# ------------------------------------------------------------------------------
# Strategies of the technique `sac`: selective recompute by policy, and regions.
# ------------------------------------------------------------------------------


def _sac(model: nn.Module, sample: Sample, *, policy: str) -> list[str]:
    return apply_sac(model, policy, blocks=sample.blocks)


def _regions(model: nn.Module, sample: Sample) -> list[str]:
    """Apply regions; undo them and return no names if they free nothing."""
    if sample.batch is None:
        return apply_regions(model, blocks=sample.blocks)
    before = measure_memory(model, sample.batch, sample.loss)
    names = apply_regions(model, blocks=sample.blocks)
    if measure_memory(model, sample.batch, sample.loss).held_bytes < before.held_bytes:
        return names
    remove_regions(model)
    return []


SAC_STRATEGIES = (
    Strategy(
        "sac",
        "keep products, attention and convolutions, by operation",
        partial(_sac, policy="save_expensive"),
    ),
    Strategy(
        "sac_matmuls",
        "keep matrix products alone, by operation",
        partial(_sac, policy="save_matmuls"),
    ),
    Strategy(
        "sac_attention",
        "keep attention alone, by operation",
        partial(_sac, policy="save_attention"),
    ),
    Strategy(
        "sac_every_second",
        "keep attention and every second matrix product, by operation",
        partial(_sac, policy="every_second_matmul"),
    ),
    Strategy("regions", "keep products and attention, without a dispatch mode", _regions),
)


# ------------------------------------------------------------------------------
# Strategies of the technique `snn-timesteps`: recompute chunks of a loop over time.
# ------------------------------------------------------------------------------


def _timesteps(model: nn.Module, sample: Sample, *, levels: int = 1) -> list[str]:
    if sample.blocks is not None:
        raise ValueError(
            f"timesteps are recomputed for the whole loop, not for single blocks, "
            f"got blocks {sample.blocks!r}: leave out --blocks"
        )
    return recompute_timesteps(model, levels=levels)


def _nested(model: nn.Module, sample: Sample) -> list[str]:
    return _timesteps(model, sample, levels=2)


TIMESTEP_STRATEGIES = (
    Strategy("timesteps", "recompute a loop over time in chunks", _timesteps),
    Strategy("timesteps_nested", "the same with chunks inside larger chunks", _nested),
)


# ------------------------------------------------------------------------------
# Apply a `CheckpointConfig`: recompute all blocks, segments, or the layers that hold most.
# ------------------------------------------------------------------------------


class SelectiveCheckpointer:
    """Choose the layers that a configuration selects, and recompute them."""

    def __init__(self, config: CheckpointConfig, profiler: MemoryProfiler | None = None) -> None:
        self.config = config
        self.profiler = profiler
        self._layers: list[str] = []

    def apply(
        self,
        model: nn.Module,
        profile_report: ProfileReport | None = None,
        *,
        batch: Any = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> nn.Module:
        """Apply the configuration to a model in place, and return the model.

        Call it before DDP, `fully_shard` and `torch.compile`. What has to be measured first (the
        profile of `selective`, the count of segments) is measured on `batch`.
        """
        config = self.config
        self._layers = []
        if not config.enabled:
            return model
        if config.snn_timestep_checkpoint:
            self._layers = primitives.recompute_timesteps(model, chunk_size=config.snn_chunk_size)
        elif config.strategy == "full":
            self._recompute(model, self._filter(list(find_blocks(model))))
        elif config.strategy == "sequential":
            self._segment(model, batch, loss)
        elif config.strategy == "selective":
            report = profile_report or self._profile(model, batch, loss)
            self._recompute(model, self._largest(report))
        elif config.strategy == "plan":
            self._layers = _load_plan(config.plan).apply(model)
        elif config.strategy in STRATEGIES:
            names = self._filter(list(find_blocks(model)))
            self._layers = STRATEGIES[config.strategy].apply(
                model, Sample(batch, loss or sum_of_output, names)
            )
        elif config.strategy != "none":
            raise ValueError(
                f"strategy {config.strategy!r} is not in this project, which has "
                f"{', '.join(STRATEGIES)}; `scripts/scaffold.py list` names the techniques that "
                "can be added"
            )
        return model

    def get_checkpointed_layers(self) -> list[str]:
        """Return the layers that the last `apply` changed."""
        return list(self._layers)

    def _recompute(self, model: nn.Module, names: list[str]) -> None:
        if names:
            options = {
                "use_reentrant": self.config.use_reentrant,
                "preserve_rng_state": self.config.preserve_rng_state,
            }
            self._layers = recompute_blocks(model, blocks=names, **options)

    def _segment(
        self, model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] | None
    ) -> None:
        names = self._filter(list(find_blocks(model)))
        count = self.config.sequential_segments
        if count is None:
            if batch is None or loss is None:
                raise ValueError(
                    "sequential_segments=None measures the peak of each count and needs a batch: "
                    "call apply(model, batch=..., loss=...), or set a number"
                )
            count = choose_segments(model, batch, loss, blocks=names)
        self._layers = recompute_segments(
            model, count, blocks=names, preserve_rng_state=self.config.preserve_rng_state
        )

    def _profile(
        self, model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] | None
    ) -> ProfileReport:
        if batch is None or not self.config.profile_before_apply:
            raise ValueError(
                "strategy 'selective' chooses by the bytes of each layer and needs a profile: call "
                "apply(model, MemoryProfiler(model).profile(sample)), or apply(model, batch=...)"
            )
        profiler = self.profiler or MemoryProfiler(model)
        return profiler.profile(batch, self.config.profile_num_runs, loss=loss)

    def _largest(self, report: ProfileReport) -> list[str]:
        """Choose layers that hold at least the threshold, and would hold less if recomputed."""
        large = {
            layer.name
            for layer in report.layers
            if layer.megabytes >= self.config.memory_threshold_mb
            and layer.bytes > layer.boundary_bytes
        }
        names = self._filter([layer.name for layer in report.layers])
        return [name for name in names if name in large]

    def _filter(self, names: list[str]) -> list[str]:
        """Keep the included names that are not excluded; a pattern without a match is an error."""
        config = self.config
        matched = _names_matching(names, config.include_patterns, option="include_patterns")
        excluded = _names_matching(names, config.exclude_patterns, option="exclude_patterns")
        included = matched if config.include_patterns else set(names)
        return [name for name in names if name in included - excluded]


def _names_matching(names: list[str], patterns: Sequence[str], *, option: str) -> set[str]:
    """Return the names that any of the patterns matches."""
    return {name for pattern in patterns for name in match_names(names, pattern, option=option)}


def _load_plan(path: Any) -> Any:
    """Load a plan; the import is late because a project may not have the technique memory-plan."""
    from .. import plan as package

    return package.Plan.load(path)


# Nothing and whole blocks come first: the others are read against them.
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        *RECOMPUTE_STRATEGIES,
        *MEMORY_BUDGET_STRATEGIES,
        *OFFLOAD_STRATEGIES,
        *SAC_STRATEGIES,
        *TIMESTEP_STRATEGIES,
    )
}
