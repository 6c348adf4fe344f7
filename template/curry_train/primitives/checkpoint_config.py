"""Configuration of recompute, validated when it is created.

    CheckpointConfig.from_config(
        {"enabled": True, "strategy": "sequential", "sequential_segments": 4}
    )

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..core.nearest import did_you_mean, nearest

STRATEGIES = ("none", "full", "selective", "sequential", "sac", "offload", "memory_budget", "plan")


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
    # The file that strategy `plan` applies, as written by `plan_memory.py --out`.
    plan: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is bool:
                value = getattr(self, field.name)
                _require(isinstance(value, bool), field.name, value, "True or False")

        closest = nearest(str(self.strategy), STRATEGIES)
        known = f"one of {', '.join(STRATEGIES)}"
        if closest:
            known += f"; did you mean {closest!r}?"
        _require(self.strategy in STRATEGIES, "strategy", self.strategy, known)

        threshold = self.memory_threshold_mb
        _require(
            _is_number(threshold) and threshold >= 0,
            "memory_threshold_mb",
            threshold,
            "a number of MB from 0 up",
        )
        chunk_size = self.snn_chunk_size
        _require(
            chunk_size is None or _is_count(chunk_size),
            "snn_chunk_size",
            chunk_size,
            "a whole number from 1 up, or None to take the size from measured bytes",
        )

        num_runs = self.profile_num_runs
        _require(_is_count(num_runs), "profile_num_runs", num_runs, "a whole number from 1 up")

        segments = self.sequential_segments
        _require(
            segments is None or _is_count(segments),
            "sequential_segments",
            segments,
            "a whole number from 1 up, or None to choose the one with the lowest measured peak",
        )
        for name in ("exclude_patterns", "include_patterns"):
            patterns = getattr(self, name)
            is_list_of_globs = isinstance(patterns, list | tuple) and all(
                isinstance(pattern, str) and pattern for pattern in patterns
            )
            _require(
                is_list_of_globs,
                name,
                patterns,
                "a list of globs over module names, such as ['layers.*']",
            )
            setattr(self, name, tuple(patterns))

        wanted = "the path of a plan with strategy 'plan', None with others"
        _require((self.plan is not None) == (self.strategy == "plan"), "plan", self.plan, wanted)

        _require(
            not (self.use_reentrant and self.strategy == "sequential"),
            "use_reentrant",
            True,
            "False with strategy 'sequential', whose segments pass more than positional tensors",
        )

    @classmethod
    def from_config(cls, config: Any) -> "CheckpointConfig":
        """Build from a mapping (unknown keys are errors) or from an object's attributes."""
        names = [field.name for field in fields(cls)]
        if not isinstance(config, Mapping):
            return cls(**{name: getattr(config, name) for name in names if hasattr(config, name)})
        for key in config:
            if key not in names:
                raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), names)}")

        values = {str(key): config[key] for key in config}
        for name in ("exclude_patterns", "include_patterns"):
            if name in values and not isinstance(values[name], str):
                values[name] = tuple(values[name])
        return cls(**values)


def _require(is_valid: bool, name: str, value: Any, wanted: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} must be {wanted}; got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
