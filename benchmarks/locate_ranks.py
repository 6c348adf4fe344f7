"""Trainings on two ranks for the benchmark of `runs locate`, each recorded into a folder.

They are a job of `run_ranks`, without a program of a user's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curry_train.gates.loop_run import End
from curry_train.runs import record_run
from curry_train.runs.fingerprints import read_fingerprints
from locate_faults import Fault, Planter, Training
from locate_models import BATCH_SIZE, MICROBATCHES, MODELS, STEPS, plain, quietly

# Faults of one rank: of its data, its forward, its copy of the state.
KINDS = ("data", "activation", "weight_between_steps", "optimizer_state", "kernel")
NAMES = ("encoder", "sampled")


def train(
    name: str, folder: Path, wrap: Any, fault: Fault | None = None, *, own: bool = True
) -> Any:
    rank = torch.distributed.get_rank()
    with record_run(folder, steps=STEPS):
        torch.manual_seed(0)
        model, samples = MODELS[name]()
        begin = rank * STEPS * MICROBATCHES * BATCH_SIZE if own else 0
        wrapped = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        training = Training(model, optimizer, samples[begin:])
        if fault is not None and rank == 1:
            fault.plant(training)
        plain(wrapped, optimizer, training.samples)
    return read_fingerprints(folder, rank)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def train_all(folder: Path, count: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    made = {}
    reference = {name: train(name, folder / f"right-{name}", ddp) for name in NAMES}
    for number in range(count):
        name = NAMES[number % len(NAMES)]
        fault = None
        for seed in range(9):
            fault = fault or Planter(reference[name], [], f"{number} {seed}").draw(
                KINDS[number % len(KINDS)]
            )
        assert fault is not None
        train(name, folder / f"fault-{number}", ddp, fault)
        facts = {key: value for key, value in vars(fault).items() if key not in ("plant", "mode")}
        made[f"fault-{number}"] = facts | {"model": name}
    train("encoder", folder / "again", ddp)
    train("encoder", folder / "one process", lambda model: model, own=False)
    train("encoder", folder / "FSDP2", fully_shard, own=False)
    train("encoder", folder / "DDP", ddp)
    torch.distributed.destroy_process_group()
    return made


@dataclass(frozen=True)
class RankTrainings:
    """Records trainings into a folder, so many of them with a fault on the second rank."""

    folder: str
    count: int

    def __call__(self, run: Callable[[], None], end: End) -> None:
        with quietly():
            made = train_all(Path(self.folder), self.count)
        end({"faults": made})
