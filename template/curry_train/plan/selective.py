"""Apply a `CheckpointConfig`: recompute all blocks, segments, or the layers that hold most.

    config = CheckpointConfig(enabled=True, memory_threshold_mb=5)
    SelectiveCheckpointer(config).apply(model, report)

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .. import primitives
from ..core.blocks import find_blocks, match_names
from ..primitives.checkpoint_config import CheckpointConfig
from ..primitives.recompute import recompute_blocks
from ..primitives.segments import choose_segments, recompute_segments
from .profiler import MemoryProfiler, ProfileReport, sum_of_output
from .strategies import STRATEGIES
from .strategy import Sample


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
