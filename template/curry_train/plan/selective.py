"""Apply a `CheckpointConfig` to a model: everything, nothing, segments, or the layers that hold the most.

    SelectiveCheckpointer(CheckpointConfig(enabled=True, memory_threshold_mb=5)).apply(model, report)

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from collections.abc import Callable
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
    """Chooses the layers that a configuration means, and makes them recompute in place."""

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
        """Return the model, changed. Before DDP, `fully_shard` and `torch.compile`.

        What has to be measured first (the profile of `selective`, the count of segments) is measured on `batch`.
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
                f"strategy {config.strategy!r} is not in this project, which has {', '.join(STRATEGIES)}; "
                "`scripts/scaffold.py list` names the techniques that can be added"
            )
        return model

    def get_checkpointed_layers(self) -> list[str]:
        """The layers that the last `apply` made recompute."""
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
        names, count = self._filter(list(find_blocks(model))), self.config.sequential_segments
        if count is None:
            if batch is None or loss is None:
                raise ValueError(
                    "sequential_segments=None measures the peak of each count and needs a batch: call "
                    "apply(model, batch=..., loss=...), or set a number"
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
                "strategy 'selective' chooses by what each layer holds and needs a profile: call "
                "apply(model, MemoryProfiler(model).profile(sample)), or apply(model, batch=...)"
            )
        profiler = self.profiler or MemoryProfiler(model)
        return profiler.profile(batch, self.config.profile_num_runs, loss=loss)

    def _largest(self, report: ProfileReport) -> list[str]:
        """Layers that hold at least the threshold, and would hold less recomputed."""
        large = {
            layer.name
            for layer in report.layers
            if layer.megabytes >= self.config.memory_threshold_mb
            and layer.bytes > layer.boundary_bytes
        }
        return [
            name for name in self._filter([layer.name for layer in report.layers]) if name in large
        ]

    def _filter(self, names: list[str]) -> list[str]:
        """The included names less the excluded ones; a pattern that takes none is an error."""
        config = self.config
        taken = [
            {name for pattern in patterns for name in match_names(names, pattern, option=option)}
            for option, patterns in (
                ("include_patterns", config.include_patterns),
                ("exclude_patterns", config.exclude_patterns),
            )
        ]
        included = taken[0] if config.include_patterns else set(names)
        return [name for name in names if name in included - taken[1]]


def _load_plan(path: Any) -> Any:
    """Plans belong to another technique, which this project may not have."""
    from .. import plan as package

    return package.Plan.load(path)
