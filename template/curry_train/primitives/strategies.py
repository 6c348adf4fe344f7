"""The registry of strategies: each way to use less memory, by name.

    STRATEGIES["sac"].apply(model, Sample(batch, loss))
    apply_config(model, CheckpointConfig(enabled=True, strategy="full"))

Commands list them from here; the levers of a benchmark and `CheckpointConfig.strategy` are views of
them. Settings that were not given are chosen from measured bytes: layers to recompute and numbers
of segments.

Proof: `python -m pytest tests/gates tests/primitives/test_strategies.py`.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from os import PathLike
from types import NoneType
from typing import Any

from torch import nn

# Loads offload, the loop over timesteps and the compiler, which takes seconds, when they are used.
from .. import primitives
from ..core.blocks import Globs, NoBlocks, find_blocks, match_names
from ..core.measure import LayerMemory, Loss, as_trained, divide, measure_layers, measure_memory
from ..core.wording import did_you_mean
from .recompute import recompute_blocks
from .regions import apply_regions, remove_regions
from .running_blocks import ChosenBlocks, choose_blocks
from .sac import apply_sac
from .segments import ChainBroken, chains_of, recompute_segments, remove_segments

# Strategy: a named way to use less memory, with functions that apply it to a model.


@dataclass(frozen=True)
class Sample:
    """Inputs that a strategy may use to measure a model before it chooses."""

    batch: Any
    loss: Any  # a `Loss`; without a batch None
    blocks: Globs | None = None  # names or globs; None for the repeated blocks

    # Keywords of `Recompute`, for the strategies that recompute calls.
    options: Mapping[str, Any] = field(default_factory=dict)

    # Of strategy `sequential`; None to choose the number with the lowest peak.
    num_segments: int | None = None


Apply = Callable[[nn.Module, Sample], list[str]]


@dataclass(frozen=True)
class Strategy:
    """A named way to use less memory."""

    name: str
    summary: str  # one line for the commands

    # Changes a model in place, and returns the names of the modules that it changed.
    apply: Apply


# Settings chosen from measured bytes: layers and segments to recompute.


def profile_layers(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    blocks: Globs | None = None,
    *,
    num_runs: int = 1,
) -> list[LayerMemory]:
    """Measure what the layers of a model hold for backward, most bytes first.

    The last of `num_runs` runs after a warm-up counts.
    """
    layers = divide(model, blocks=blocks)
    with as_trained(model):
        for _ in range(1 + num_runs):
            measured = measure_layers(model, batch, loss, layers)
    return sorted(measured, key=lambda layer: -layer.bytes)


def choose_largest(layers: Sequence[LayerMemory], gap: int) -> tuple[list[str], int]:
    """Choose layers to recompute that free `gap` bytes; return them and the bytes still lacking.

    The choice is greedy: take the largest saving until a single layer can close the gap, then the
    smallest saving that closes it. Of equal layers the first is taken, because the last ones would
    be recomputed while most bytes are held.
    """
    chosen: list[str] = []
    left = sorted(
        (layer for layer in layers if layer.saving_bytes > 0), key=lambda layer: layer.saving_bytes
    )
    while gap > 0 and left:
        largest = max(left, key=lambda layer: layer.saving_bytes)
        layer = next((layer for layer in left if layer.saving_bytes >= gap), largest)
        left.remove(layer)
        chosen.append(layer.name)
        gap -= layer.saving_bytes
    return chosen, max(0, gap)


def choose_segments(
    model: nn.Module, batch: Any, loss: Loss, *, blocks: Globs | None = None
) -> int:
    """Measure which number of segments has the lowest peak.

    Of several with the same peak the smallest number is returned, which recomputes least.
    """
    longest = max(map(len, chains_of(list(find_blocks(model, blocks)))))
    peaks = {}
    for count in sorted({-(-longest // size) for size in range(1, longest + 1)}):
        recompute_segments(model, count, blocks=blocks)
        try:
            peaks[count] = measure_memory(model, batch, loss).peak_bytes
        except ChainBroken:
            # Segments of one block never break the chain, and a single segment is not recomputed.
            continue
        finally:
            remove_segments(model)
    return min(peaks, key=peaks.__getitem__)


# Recompute: none, full, sequential and selective.

# Fraction of the held bytes to keep, for the example in the commands; users set a threshold or a
# budget instead.
SELECTIVE_SHARE = 0.6


def _apply_sequential(model: nn.Module, sample: Sample) -> list[str]:
    count = sample.num_segments
    if count is None:
        if sample.batch is None:
            raise ValueError(
                "sequential_segments=None measures the peak of each count and needs a batch: "
                "call apply(model, batch=..., loss=...), or set a number"
            )
        count = choose_segments(model, sample.batch, sample.loss, blocks=sample.blocks)
    return recompute_segments(model, count, blocks=sample.blocks, **sample.options)


def _apply_selective(model: nn.Module, sample: Sample) -> list[str]:
    layers = profile_layers(model, sample.batch, sample.loss, sample.blocks)
    held = sum(layer.bytes for layer in layers)
    names, _ = choose_largest(layers, held - round(SELECTIVE_SHARE * held + 1))
    return recompute_blocks(model, blocks=names)


# Selective recompute by policy, and regions.


def _apply_sac(model: nn.Module, sample: Sample, *, policy: str = "save_expensive") -> list[str]:
    return apply_sac(model, policy, blocks=sample.blocks, **sample.options)


def _apply_regions(model: nn.Module, sample: Sample) -> list[str]:
    """Apply regions; undo them and return no names if they free nothing."""
    if sample.batch is None:
        return apply_regions(model, blocks=sample.blocks)
    before = measure_memory(model, sample.batch, sample.loss)
    names = apply_regions(model, blocks=sample.blocks)
    if measure_memory(model, sample.batch, sample.loss).held_bytes < before.held_bytes:
        return names
    remove_regions(model)
    return []


# Offload of the activations of blocks to host memory.


def _apply_offload(model: nn.Module, sample: Sample) -> list[str]:
    """Offload all blocks but the last; a single block is offloaded itself."""
    num_blocks = len(find_blocks(model, sample.blocks))
    return primitives.offload_blocks(model, blocks=sample.blocks, keep_last=min(1, num_blocks - 1))


def moved_bytes(model: nn.Module) -> dict[str, float]:
    """Report the bytes that the last step moved, next to what `save_on_cpu` would have copied.

    `save_on_cpu` copies every tensor that autograd saves in the blocks.
    """
    report = primitives.offload_report(model)
    everything = report.moved_bytes + sum(nbytes for _, nbytes in report.skipped.values())
    return {
        "moved_bytes": report.moved_bytes,
        "of_save_on_cpu": report.moved_bytes / everything if everything else 0.0,
    }


# The compiler's memory budget, and loops over time.

MEMORY_BUDGET_SHARE = 0.5  # of the bytes that compiled code saves for backward


def _apply_memory_budget(model: nn.Module, sample: Sample) -> list[str]:
    cuda = any(parameter.device.type == "cuda" for parameter in model.parameters())
    return primitives.memory_budget(
        model,
        MEMORY_BUDGET_SHARE,
        blocks=sample.blocks,
        backend="inductor" if cuda else "aot_eager",
        batch=sample.batch,
        loss=None if sample.batch is None else sample.loss,
    )


def _apply_timesteps(model: nn.Module, sample: Sample) -> list[str]:
    if sample.blocks is not None and not isinstance(sample.blocks, ChosenBlocks):
        raise ValueError(
            f"timesteps are recomputed for the whole loop, not for single blocks, "
            f"got blocks {sample.blocks!r}: leave out --blocks"
        )
    return primitives.recompute_timesteps(model)


# The registry. Nothing and whole blocks come first: the others are read against them.

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("none", "keep every activation", lambda model, sample: []),
        Strategy(
            "full",
            "recompute every block",
            lambda model, sample: recompute_blocks(model, blocks=sample.blocks, **sample.options),
        ),
        Strategy(
            "sequential",
            "recompute runs of blocks, the count with the lowest peak",
            _apply_sequential,
        ),
        Strategy(
            "selective",
            "recompute the largest blocks until 60% of the bytes are held",
            _apply_selective,
        ),
        Strategy(
            "memory_budget",
            "compiled, half of the saved bytes (aot_eager on CPU)",
            _apply_memory_budget,
        ),
        Strategy("offload", "move what the blocks hold to CPU memory", _apply_offload),
        Strategy("sac", "keep products, attention and convolutions, by operation", _apply_sac),
        Strategy(
            "sac_matmuls",
            "keep matrix products alone, by operation",
            partial(_apply_sac, policy="save_matmuls"),
        ),
        Strategy(
            "sac_attention",
            "keep attention alone, by operation",
            partial(_apply_sac, policy="save_attention"),
        ),
        Strategy(
            "sac_every_second",
            "keep attention and every second matrix product, by operation",
            partial(_apply_sac, policy="every_second_matmul"),
        ),
        Strategy("regions", "keep products and attention, without a dispatch mode", _apply_regions),
        Strategy("timesteps", "recompute a loop over time in chunks", _apply_timesteps),
    )
}

# Configuration of recompute, validated when it is created, and applied to a model.

ON_BLOCKS = ("full", "selective", "sequential", "sac", "regions", "offload", "memory_budget")
# The values of `CheckpointConfig.strategy`; commands do not list `plan`, which needs a file.
CONFIGURED_STRATEGIES = ("none", *ON_BLOCKS, "plan")
# The strategies that read a setting; with the others its value has to be the default.
STRATEGIES_BY_SETTING = {
    "memory_threshold_mb": ("selective",),
    "profile_before_apply": ("selective",),
    "profile_num_runs": ("selective",),
    "sequential_segments": ("sequential",),
    "snn_chunk_size": ("snn_timestep_checkpoint",),
    # Segments pass more than positional tensors.
    "use_reentrant": ("full", "selective"),
    "preserve_rng_state": ("full", "selective", "sequential", "sac"),
    "include_patterns": ON_BLOCKS,
    "exclude_patterns": ON_BLOCKS,
}


# By the type of a setting: the types of its values, and the words for what is accepted.
ACCEPTED_VALUES: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number from 0 up"),
    int | None: ((int, NoneType), "a whole number, or None to choose it by measured bytes"),
    float: ((int, float), "a number of MB from 0 up"),
    tuple[str, ...]: (
        (list, tuple),
        "a list of globs over module names, such as ['layers.*']",
    ),
}


@dataclass
class CheckpointConfig:
    """Settings that select what to recompute and how."""

    # `strategy` is used only when this is True.
    enabled: bool = False
    strategy: str = "selective"
    memory_threshold_mb: float = 50.0
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    # Replaces `strategy`: recompute of layers and of chunks of timesteps cannot be combined.
    snn_timestep_checkpoint: bool = False
    snn_chunk_size: int | None = 1
    sequential_segments: int | None = None
    profile_before_apply: bool = True
    profile_num_runs: int = 3
    # Globs over module names.
    exclude_patterns: tuple[str, ...] = ()
    include_patterns: tuple[str, ...] = ()
    # The file that strategy `plan` applies, as written by `curry-train plan --out`.
    plan: str | None = None

    def __post_init__(self) -> None:
        if self.strategy not in CONFIGURED_STRATEGIES:
            raise ValueError(
                f"no strategy is called {self.strategy!r}; "
                f"{did_you_mean(str(self.strategy), CONFIGURED_STRATEGIES)}"
            )
        wanted_plan: Any = str | PathLike if self.strategy == "plan" else NoneType
        if not isinstance(self.plan, wanted_plan):
            raise ValueError(
                "plan must be the path of a plan with strategy 'plan', None with others; got "
                f"{self.plan!r}"
            )
        chosen = "snn_timestep_checkpoint" if self.snn_timestep_checkpoint else self.strategy
        for setting in fields(self):
            value = getattr(self, setting.name)
            accepted, wanted = ACCEPTED_VALUES.get(setting.type, ((type(value),), ""))
            is_number = isinstance(value, int | float)
            if type(value) not in accepted or (is_number and not 0 <= value < math.inf):
                raise ValueError(f"{setting.name} must be {wanted}; got {value!r}")
            if isinstance(setting.default, tuple):
                value = tuple(value)
                setattr(self, setting.name, value)
            users = STRATEGIES_BY_SETTING.get(setting.name, (chosen,))
            if value != setting.default and chosen not in users:
                raise ValueError(
                    f"{setting.name}={value!r} has no effect with {chosen}, only with "
                    f"{', '.join(users)}: leave it out"
                )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "CheckpointConfig":
        """Build from a mapping; an unknown key is an error."""
        names = [setting.name for setting in fields(cls)]
        for key in config:
            if key not in names:
                raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), names)}")
        return cls(**config)


def apply_config(
    model: nn.Module,
    config: CheckpointConfig,
    *,
    batch: Any = None,
    loss: Loss | None = None,
    layers: Sequence[LayerMemory] | None = None,
    apply_plan: Callable[[nn.Module], list[str]] | None = None,
) -> list[str]:
    """Apply a configuration to a model in place, and return the names of the changed modules.

    Strategy `selective` chooses by the bytes of `layers`, or measures them on `batch`; the others
    measure on `batch` too. Strategy `plan` calls `apply_plan`, the method of a plan that was loaded
    from `config.plan`. Call this before DDP, `fully_shard` and `torch.compile`.
    """
    if not config.enabled:
        return []
    if config.snn_timestep_checkpoint:
        return primitives.recompute_timesteps(model, chunk_size=config.snn_chunk_size)
    if config.strategy == "plan":
        if apply_plan is None:
            raise ValueError("strategy 'plan' needs a plan: give apply_plan=plan.apply")
        return apply_plan(model)
    if batch is not None and loss is None:
        raise ValueError("batch is given and loss is not: measuring a step needs both")
    strategy = config.strategy
    blocks: Globs | None = None
    if strategy == "selective":
        # Layers above the threshold are recomputed as blocks are.
        strategy = "full"
        blocks = _find_large_layers(model, config, batch, loss, layers)
    elif strategy != "none":
        # Patterns are over the blocks that the model's containers give.
        if batch is None or loss is None or config.include_patterns or config.exclude_patterns:
            blocks = _filter_names(config, list(find_blocks(model)))
        else:
            blocks = choose_blocks(model, batch, loss).names
    options = {name: getattr(config, name) for name in ("use_reentrant", "preserve_rng_state")}
    sample = Sample(batch, loss, blocks, options, config.sequential_segments)
    changed = STRATEGIES[strategy].apply(model, sample)
    if not config.use_reentrant:
        primitives.keep_routing(model)
    return changed


def _find_large_layers(
    model: nn.Module,
    config: CheckpointConfig,
    batch: Any,
    loss: Any,
    layers: Sequence[LayerMemory] | None,
) -> list[str]:
    """Return the layers that hold at least the threshold, and would hold less if recomputed."""
    if layers is None:
        if batch is None or not config.profile_before_apply:
            raise ValueError(
                "strategy 'selective' chooses by the bytes of each layer and needs a profile: call "
                "apply(model, MemoryProfiler(model).profile(sample)), or apply(model, batch=...)"
            )
        blocks = None
        if not config.include_patterns and not config.exclude_patterns:
            with contextlib.suppress(NoBlocks):
                blocks = choose_blocks(model, batch, loss).blocks
        layers = profile_layers(model, batch, loss, blocks, num_runs=config.profile_num_runs)
    names = _filter_names(config, [layer.name for layer in layers])
    return [
        layer.name
        for layer in layers
        if layer.name in names
        and layer.bytes / 2**20 >= config.memory_threshold_mb
        and layer.saving_bytes > 0
    ]


def _filter_names(config: CheckpointConfig, names: list[str]) -> list[str]:
    """Keep the included names that are not excluded; a pattern without a match is an error."""
    included = match_names(names, config.include_patterns or "*", option="include_patterns")
    excluded = match_names(names, config.exclude_patterns, option="exclude_patterns")
    return [name for name in included if name not in excluded]
