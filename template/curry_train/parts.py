"""Build the parts of a run: model, recompute, ranks, optimizer and data.

    parts = build_parts(config, ranks)

Read and change this file first. Proof: `python -m pytest tests/test_training.py`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import Config, OptimizerConfig
from .core.load import load_workload
from .core.untouched import untouched
from .core.workload import Batch, Case
from .data.dataset import Dataset
from .data.stream import Stream
from .datasets import open_datasets
from .distribute import Ranks, share
from .evaluation import mean_loss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Parts:
    """Model, optimizer, data and settings of a run.

    `changed` names the modules that recompute; `dev` is None without dev samples.
    """

    config: Config
    ranks: Ranks
    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    stream: Stream
    dev: Dataset | None
    num_parameters: int
    changed: Sequence[str]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the terms of a microbatch, in the configured precision."""
        precision = DTYPES[self.config.precision]
        with torch.autocast(self.case.device.type, precision, enabled=precision != torch.float32):
            return self.case.workload.loss(model, self.case.place(batch))

    def dev_loss(self) -> float:
        assert self.dev is not None
        measure = functools.partial(mean_loss, rank=self.ranks.rank, ranks=self.ranks.size)
        sizes = {"samples": self.config.evaluate.samples, "microbatch": self.config.microbatch}
        return measure(self.model, self.dev, self.loss, self.case.workload.count, **sizes)


def build_parts(config: Config, ranks: Ranks) -> Parts:
    """Build the parts with the same weights on every rank.

    Recompute is applied before the model is wrapped for several ranks.
    """
    workload = load_workload(config.model)
    dtype = DTYPES[config.dtype]
    case = Case(workload, ranks.device, dtype, batch_size=config.microbatch, seed=config.seed)
    module = case.build()
    data, dev = open_datasets(config.data, case, vocabulary=_vocabulary(module))
    stream = Stream(
        data,
        batch_size=config.batch_size,
        microbatch=config.microbatch,
        seed=config.seed,
        shuffle=config.data.shuffle,
        rank=ranks.rank,
        ranks=ranks.size,
        skipped=[(start, stop) for start, stop in config.data.skip],
    )
    if config.data.length is not None:
        _check_length(module, data, case, config.data.length)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    changed = _recompute(module, config, case, data)
    model = share(module, ranks, parallel=config.parallel, precision=DTYPES[config.precision])
    optimizer = make_optimizer(config.optimizer, model)
    scaler = torch.amp.GradScaler(ranks.device.type) if config.precision == "float16" else None
    return Parts(
        config, ranks, case, model, optimizer, scaler, stream, dev, num_parameters, changed
    )


def make_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group | {"initial_lr": config.learning_rate} for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def _recompute(module: nn.Module, config: Config, case: Case, data: Dataset) -> Sequence[str]:
    """Apply the configured recompute and return the names of the changed modules.

    Other techniques are imported on demand, because a project may not have them.
    """
    wanted = config.recomputation()
    if not wanted.enabled:
        return []
    from . import plan

    if (
        wanted.plan is not None
        and (planned := plan.Plan.load(wanted.plan)).microbatch < config.microbatch
    ):
        raise ValueError(
            f"{wanted.plan} is for a microbatch of {planned.microbatch}, and {config.microbatch} "
            "samples take more memory than was planned: set "
            f"microbatch={planned.microbatch}, or plan again with --microbatch"
        )
    chooser = plan.SelectiveCheckpointer(wanted)
    chooser.apply(
        module, batch=case.place(data.batch(range(config.microbatch))), loss=case.workload.mean_loss
    )
    changed = chooser.get_checkpointed_layers()
    # A plan may change nothing, where everything fits without recompute.
    if not changed and wanted.strategy not in ("none", "plan"):
        raise ValueError(
            f"recompute.strategy={wanted.strategy} changes no layer of {case.workload.name}: lower "
            "recompute.memory_threshold_mb, name layers with recompute.include_patterns, or use "
            "another strategy"
        )
    return changed


def _check_length(module: nn.Module, data: Dataset, case: Case, length: int) -> None:
    """Run one sample to find out whether the model accepts its length."""
    batch = case.place(data.batch([0]))
    try:
        with untouched(module), torch.no_grad():
            case.workload.loss(module, batch)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"data.length={length}: {case.workload.name} can't take such a sample "
            f"({str(error).splitlines()[0]}); use shorter ones, data.length=null for the length of "
            "its own batch, or a model that is built for it"
        ) from error


def _vocabulary(module: nn.Module) -> int | None:
    """Return the vocabulary size of the model's first embedding, None without one."""
    tables = (layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding))
    return next(tables, None)
