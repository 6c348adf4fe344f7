"""Read the configuration from YAML and key=value words, and compute the learning rate.

    config = load_config("config.yaml", ["steps=1000", "optimizer.learning_rate=3e-4"])

It is checked before anything else happens: unknown keys, wrong types and impossible combinations
are errors that name the key.

Proof: `python -m pytest tests/trainer/test_config.py`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from .primitives.strategies import CheckpointConfig
from .runs.policy_config import (
    AUTO_INTERVAL,
    BoxConfig,
    PolicyConfig,
    SpikeConfig,
    read_fields,
    require,
    require_least,
)

# Configuration of a run, from a YAML file and `key=value` words.

MEASURED_METRICS = ("dev_loss", "loss")


@dataclass(frozen=True)
class DataConfig:
    """Source of the samples, and how they are cut and split."""

    # text (the source files of Python's library), tokens (files at `path`), workload (the batches
    # of the model's factory), or pkg.module:factory for your own dataset.
    source: str = "text"
    # A glob over .npy or .bin files.
    path: str | None = None
    # Tokens per sample; None takes the length of the model's own batch.
    length: int | None = None
    shuffle: bool = True
    # Fraction of the samples, at the end, that is never trained on.
    dev_fraction: float = 0.05
    # Ranges of data positions to skip, as pairs (start, stop).
    skip: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        is_known = self.source in ("text", "tokens", "workload") or ":" in self.source
        require(is_known, "source", self.source, "text, tokens, workload or pkg.module:factory")
        path_fits = (self.path is not None) == (self.source == "tokens")
        require(path_fits, "path", self.path, "a glob where source is tokens")
        require_least(self, 1, "length")
        are_ranges = all(len(pair) == 2 and 0 <= pair[0] < pair[1] for pair in self.skip)
        wanted = "pairs such as [[5760, 5888]], from a position up to a greater one"
        require(are_ranges, "skip", self.skip, wanted)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or SGD with `beta1` as momentum.

    Weight decay applies to matrices, not to vectors such as norms and biases.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        is_rate = 0 < self.learning_rate < math.inf
        require(is_rate, "learning_rate", self.learning_rate, "a number above 0")
        # Torch takes any momentum.
        require(0 <= self.beta1 < 1, "beta1", self.beta1, "from 0 to below 1")


@dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up, then decay to the factor `least` of the learning rate in the last step."""

    shape: Literal["cosine", "linear", "constant"] = "cosine"
    # None is a twentieth of the steps.
    warmup_steps: int | None = None
    least: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.least <= 1, "least", self.least, "from 0 to 1")

    def warmup(self, steps: int) -> int:
        """Return the steps of the warm-up of a run with so many steps."""
        return steps // 20 if self.warmup_steps is None else self.warmup_steps

    def factor(self, step: int, *, steps: int) -> float:
        """Return the factor on the learning rate in a step, counted from 0."""
        warmup = self.warmup(steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        falling = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.least + (1 - self.least) * falling


@dataclass(frozen=True)
class EvaluateConfig:
    """Mean loss of the same dev samples each time.

    Measured after every `every` steps and after the last.
    """

    every: int | None = 50
    samples: int = 256

    def __post_init__(self) -> None:
        require_least(self, 1, "every", "samples")


@dataclass(frozen=True)
class LogConfig:
    """Print a line every `every` steps off a terminal; the journal has each step."""

    every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        require_least(self, 1, "every")


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    name: str = "run"
    model: str = "transformer"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    # Type of the weights.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Type of the matrix products.
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    parallel: Literal["none", "ddp", "fsdp2"] = "none"
    # Number of ranks to require at the start; None accepts any.
    ranks: int | None = None
    seed: int = 0
    steps: int = 300
    # Samples of a step over all ranks.
    batch_size: int = 32
    # Samples of a microbatch on each rank.
    microbatch: int = 16
    clip_norm: float | None = 1.0
    # Folder that gets a folder for each run.
    runs: str = "runs"
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # Fields of a CheckpointConfig.
    recompute: dict[str, Any] = field(default_factory=dict)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: PolicyConfig = field(default_factory=PolicyConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    box: BoxConfig = field(default_factory=BoxConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require_least(self, 1, "steps", "batch_size", "microbatch", "ranks")
        require(0 <= self.seed < 2**63, "seed", self.seed, "from 0 to below 2**63")
        clip_fits = self.clip_norm is None or self.clip_norm > 0
        require(clip_fits, "clip_norm", self.clip_norm, "above 0, or null")
        # A path would put the run somewhere else.
        is_plain = self.name == Path(self.name).name and self.name not in ("", "..")
        require(is_plain, "name", self.name, "the name of a folder")
        metric = self.checkpoint.best_k_metric
        is_measured = metric in MEASURED_METRICS or not self.checkpoint.best_k
        wanted = f"{' or '.join(MEASURED_METRICS)}, the metrics that this loop measures"
        require(is_measured, "checkpoint.best_k_metric", metric, wanted)
        self._check_skipped_positions()
        if self.spike.rolls_back:
            _require_way_back(self.checkpoint, self.spike)
        mixes_halves = self.dtype == "bfloat16" and self.precision == "float16"
        wanted = "bfloat16 or float32 for bfloat16 weights"
        require(not mixes_halves, "precision", self.precision, wanted)
        warmup = self.schedule.warmup(self.steps)
        wanted = f"from 0 to the {self.steps} steps of the run"
        require(0 <= warmup <= self.steps, "schedule.warmup_steps", warmup, wanted)
        self.recomputation()

    def _check_skipped_positions(self) -> None:
        end = self.steps * self.batch_size
        for start, stop in sorted(self.data.skip):
            wanted = (
                "of positions that the run reaches; "
                f"{self.steps} steps of {self.batch_size} end at {end}"
            )
            require(start < end, "data.skip", [start, stop], wanted)
            end += stop - start

    def learning_rates(self) -> Callable[[int], float]:
        """Return the factor on the learning rate by step, counted from 0."""
        return functools.partial(self.schedule.factor, steps=self.steps)

    def recomputation(self) -> CheckpointConfig:
        """Return the recompute settings; naming a strategy enables recompute."""
        has_strategy = self.recompute.get("strategy", "none") != "none"
        enabled = has_strategy or bool(self.recompute.get("snn_timestep_checkpoint"))
        try:
            return CheckpointConfig.from_config({"enabled": enabled, **self.recompute})
        except ValueError as error:
            raise ValueError(f"recompute: {error}") from error

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, if any, and apply words such as `optimizer.learning_rate=3e-4`."""
    values = {} if path is None else _read_yaml(Path(path))
    set_words(values, overrides)
    return read_fields(Config, values)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"can't read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold keys and values, such as 'steps: 300'; got {type(values).__name__}"
        )
    return values or {}


def set_words(values: dict[str, Any], words: Sequence[str]) -> None:
    """Set keys by words such as `optimizer.learning_rate=3e-4`; one with a block adds to it."""
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} sets nothing: write key=value, such as steps=1000")
        value = _parse(text, key)
        *blocks, last = key.split(".")
        block = values
        for name in blocks:
            inner = block.get(name)
            if inner is not None and not isinstance(inner, Mapping):
                raise ValueError(
                    f"{name} is {inner!r}, so that {key} can't be set: set one of them"
                )
            block[name] = dict(inner or {})
            block = block[name]
        before = block.get(last)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = {**before, **value}
        block[last] = value


def _parse(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ValueError(
            f"{key}={text} is not a YAML value: {' '.join(str(error).split())}"
        ) from error


def _require_way_back(policy: PolicyConfig, spike: SpikeConfig) -> None:
    """Require that a state from before the first skipped sample is still retained."""
    name = "rollback"
    every = policy.rollback_every
    num_retained = policy.retention.rollback_keep
    if every is None:
        name = "recovery"
        every = policy.recovery_every
        num_retained = policy.retention.recovery_keep

    reach = spike.patience + spike.skip_around
    retained = every == AUTO_INTERVAL or (
        isinstance(every, int) and every * (num_retained - 1) >= reach
    )
    wanted = (
        f"warn or none, or checkpoint.{name}_every x (checkpoint.retention.{name}_keep - 1) at "
        f"least {reach}, the steps from a spike back to the first skipped sample"
    )
    require(retained, "spike.action", spike.action, wanted)
