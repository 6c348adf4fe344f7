"""Trainings on two ranks for the benchmark of `runs locate`, each recorded into a folder.

They are a job of `run_ranks`, without a program of a user's.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curry_train.gates.loop_run import End
from curry_train.runs import record_run
from curry_train.runs.fingerprints import read_fingerprints
from locate_faults import SOUND, Fault, Planter, Training
from locate_models import BATCH_SIZE, MICROBATCHES, MODELS, STEPS, plain, quietly

# Faults of one rank: of its data, its forward, its copy of the state.
KINDS = ("data", "activation", "weight_between_steps", "optimizer_state", "kernel")
NAMES = ("encoder", "sampled")


def train(name: str, folder: Path, wrap, fault: Fault = SOUND, *, own: bool = True):
    rank = torch.distributed.get_rank()
    with record_run(folder, steps=STEPS):
        torch.manual_seed(0)
        model, samples = MODELS[name]()
        begin = rank * STEPS * MICROBATCHES * BATCH_SIZE if own else 0
        wrapped = wrap(model)
        training = Training(model, samples[begin:], fault if rank == 1 else SOUND)
        plain(wrapped, training.optimizer, training.samples)
    return read_fingerprints(folder, rank)


def cases(count: int) -> Iterator[tuple[str, str]]:
    """Yield the kind of each fault, and the model in which it is planted."""
    return itertools.islice(zip(itertools.cycle(KINDS), itertools.cycle(NAMES)), count)


def fault_of_rank(number: int, kind: str, reference) -> Fault:
    return Planter(reference, [], f"{number} 0").draw(kind)


def record_trainings(folder: Path, count: int, run: Callable[[], None], end: End) -> None:
    """Record trainings into a folder, so many of them with a fault on the second rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with quietly():
        reference = {
            name: train(name, folder / f"right-{name}", DistributedDataParallel) for name in NAMES
        }
        for number, (kind, name) in enumerate(cases(count)):
            fault = fault_of_rank(number, kind, reference[name])
            train(name, folder / f"fault-{number}", DistributedDataParallel, fault)
        train("encoder", folder / "one process", lambda model: model, own=False)
        train("encoder", folder / "FSDP2", fully_shard, own=False)
    torch.distributed.destroy_process_group()
    end({"count": count})
