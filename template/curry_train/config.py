"""A run's configuration: one tree, from a YAML file and `key=value` words, checked before anything else happens.

    config = load_config("config.yaml", ["steps=1000", "optimizer.learning_rate=3e-4", "parallel=fsdp2"])

Unknown keys, wrong types and combinations that can't work are errors that name the key.
Proof: `python -m pytest tests/test_config.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from .primitives.checkpoint_config import CheckpointConfig
from .runs.policy_config import AUTO, PolicyConfig
from .runs.setting_checks import require
from .runs.spike_config import SpikeConfig
from .schedule import Schedule
from .typed_fields import flat_keys, nearest_key, read_fields

MEASURED = ("dev_loss", "loss")


@dataclass(frozen=True)
class DataConfig:
    """`source` is text (the sources of Python's library), tokens (files at `path`), workload (the batches that the
    model's factory gives), or pkg.module:factory for a dataset of your own."""

    source: str = "text"
    path: str | None = None  # a glob over .npy or .bin files
    length: int | None = None  # tokens of a sample; None is what the model's own batch has
    documents: bool = False  # FILE.documents.npy says where documents begin
    mask: bool = False  # FILE.mask.npy says which tokens are learned
    shuffle: bool = True
    dev_fraction: float = 0.05  # of the samples, at the end, never trained on
    skip: tuple[
        tuple[int, ...], ...
    ] = ()  # positions of the run, each from one up to another, that are passed over

    def __post_init__(self) -> None:
        known = self.source in ("text", "tokens", "workload") or ":" in self.source
        require(known, "source", self.source, "text, tokens, workload or pkg.module:factory")
        require(
            (self.path is not None) == (self.source == "tokens"),
            "path",
            self.path,
            "a glob where source is tokens",
        )
        for name in ("documents", "mask"):
            require(
                not getattr(self, name) or self.source == "tokens",
                name,
                True,
                "false unless source is tokens",
            )
        require(
            self.length is None or self.length >= 1, "length", self.length, "1 or more, or null"
        )
        require(0 <= self.dev_fraction < 1, "dev_fraction", self.dev_fraction, "from 0 to below 1")
        paired = all(len(pair) == 2 and 0 <= pair[0] < pair[1] for pair in self.skip)
        require(
            paired,
            "skip",
            self.skip,
            "pairs such as [[5760, 5888]], from a position up to a greater one",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or SGD with `beta1` as momentum; matrices decay, vectors (norms, biases) do not."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "above 0")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or above")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")


@dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up, then down to `least` of the learning rate in the last step."""

    shape: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int | None = None  # a twentieth of the steps
    least: float = 0.1


@dataclass(frozen=True)
class EvaluateConfig:
    """The mean loss of `samples` dev samples, the same ones each time, after every `every` steps and the last."""

    every: int | None = 50
    samples: int = 256

    def __post_init__(self) -> None:
        require(
            self.every is None or self.every >= 1,
            "every",
            self.every,
            "1 or more, or null for never",
        )
        require(self.samples >= 1, "samples", self.samples, "1 or more")


@dataclass(frozen=True)
class LogConfig:
    """A line every `every` steps where the output is no terminal; the journal has each step."""

    every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        require(self.every >= 1, "every", self.every, "1 or more")


@dataclass(frozen=True)
class Config:
    """`batch_size` samples make a step, over all ranks, in microbatches of `microbatch` on each; `dtype` is that of the
    weights, `precision` that of the products."""

    name: str = "run"
    model: str = "transformer"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    parallel: Literal["none", "ddp", "fsdp2"] = "none"
    ranks: int | None = None  # refuse to start with another number
    seed: int = 0
    steps: int = 300
    batch_size: int = 32
    microbatch: int = 16
    clip_norm: float | None = 1.0
    runs: str = "runs"  # the folder that gets a folder for each run
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    recompute: dict[str, Any] = field(default_factory=dict)  # a CheckpointConfig
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: PolicyConfig = field(default_factory=PolicyConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "microbatch"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.seed >= 0, "seed", self.seed, "0 or above")
        require(self.ranks is None or self.ranks >= 1, "ranks", self.ranks, "1 or more, or null")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            "clip_norm",
            self.clip_norm,
            "above 0, or null",
        )
        plain = self.name == Path(self.name).name and self.name not in ("", ".", "..")
        require(plain, "name", self.name, "the name of a folder")
        least = self.microbatch * (self.ranks or 1)
        wanted = f"a multiple of microbatch{' x ranks' if self.ranks else ''}, {least}"
        require(self.batch_size % least == 0, "batch_size", self.batch_size, wanted)
        wanted = "more than one rank only with parallel=ddp or parallel=fsdp2"
        require(self.parallel != "none" or self.ranks in (None, 1), "ranks", self.ranks, wanted)
        known = self.checkpoint.best_k_metric in MEASURED or not self.checkpoint.best_k
        wanted = f"{' or '.join(MEASURED)}, which are what this loop measures"
        require(known, "checkpoint.best_k_metric", self.checkpoint.best_k_metric, wanted)
        last = self.steps * self.batch_size
        for start, stop in sorted(self.data.skip):
            wanted = f"of positions that the run comes to; {self.steps} steps of {self.batch_size} end at {last}"
            require(start < last, "data.skip", [start, stop], wanted)
            last += stop - start
        if self.spike.rolls_back:
            _require_way_back(self.checkpoint, self.spike)
        half = self.dtype == "bfloat16" and self.precision == "float16"
        require(not half, "precision", self.precision, "bfloat16 or float32 for bfloat16 weights")
        try:
            self.learning_rates()
        except ValueError as error:
            raise ValueError(f"schedule.{error}") from error
        self.recomputation()

    def learning_rates(self) -> Schedule:
        schedule = self.schedule
        warmup = self.steps // 20 if schedule.warmup_steps is None else schedule.warmup_steps
        return Schedule(self.steps, warmup, schedule.least, schedule.shape)

    def recomputation(self) -> CheckpointConfig:
        """A strategy that is named is on."""
        on = self.recompute.get("strategy", "none") != "none" or bool(
            self.recompute.get("snn_timestep_checkpoint")
        )
        try:
            return CheckpointConfig.from_config({"enabled": on, **self.recompute})
        except ValueError as error:
            raise ValueError(f"recompute: {error}") from error

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """A YAML file, if any, and words such as `optimizer.learning_rate=3e-4` on top of it."""
    values = {} if path is None else _read_yaml(Path(path))
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} sets nothing: write key=value, such as steps=1000")
        _set(values, key, _parse(text, key))
    return read_fields(Config, values)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"can't read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold keys and values, such as 'steps: 300'; got {type(values).__name__}"
        )
    return values or {}


def _parse(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ValueError(
            f"{key}={text} is no YAML value: {' '.join(str(error).split())}"
        ) from error


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *folders, last = key.split(".")
    known = flat_keys(Config)
    if (
        key not in known
        and folders[:1] != ["recompute"]
        and not any(name.startswith(f"{key}.") for name in known)
    ):
        raise ValueError(f"{key} is no key; {nearest_key(key, known)}")
    for folder in folders:
        inner = values.get(folder)
        values[folder] = values = dict(inner) if isinstance(inner, Mapping) else {}
    values[last] = value


def _require_way_back(policy: PolicyConfig, spike: SpikeConfig) -> None:
    """Among the states that stay there has to be one from before the first sample that is skipped."""
    reach, every, keep, name = (
        spike.patience + spike.skip_around,
        policy.rollback_every,
        policy.retention,
        "rollback",
    )
    number = keep.rollback_keep
    if every is None or policy.rollback_parameters_only:
        every, number, name = policy.recovery_every, keep.recovery_keep, "recovery"
    held = every == AUTO or (isinstance(every, int) and every * (number - 1) >= reach)
    wanted = (
        f"warn or none, or checkpoint.{name}_every x (checkpoint.retention.{name}_keep - 1) at least {reach}, the "
        "steps from a spike back to the first sample that is skipped"
    )
    require(held, "spike.action", spike.action, wanted)
