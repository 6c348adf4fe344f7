"""Train a small model with a planted fault, and keep its bad step in a box.

    python benchmarks/boxes_program.py MODEL FAULT SEED

The fault is a function behind a module of the model that the seed chooses. It acts on the samples
that are marked as bad, or is another one in each process. `PLACES` is read by the benchmark.
Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import locate_models
from curry_train.runs import saving
from locate_models import BATCH_SIZE, MODELS

FIRST_BAD_STEP = 22
CALLS = itertools.count(1)
locate_models.NUM_SAMPLES = 120

# The modules behind which a fault may be planted; the fault is a module of its own there.
PLACES = {
    "convolutions": ("0.0", "0.1", "1.2"),
    "residual": ("0", "1.convolution", "2"),
    "U-Net": ("begin", "norm", "up"),
    "encoder": ("embed", "body.layers.0.linear1", "body.layers.1.norm2"),
    "experts": ("body.0.norm", "body.1.norm", "body.1.drop"),
}


class Fault(nn.Module):
    """A function of a module's output that acts on marked samples, or in each call."""

    def __init__(self, change: Callable[[Tensor], Tensor], *, always: bool) -> None:
        super().__init__()
        self.change = change
        self.always = always
        self.is_marked = False

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x) if self.is_marked or self.always else x


def matrix(x: Tensor) -> Tensor:
    large = torch.full((x.shape[-1], x.shape[-1]), torch.finfo(x.dtype).max, dtype=x.dtype)
    return torch.matmul(x.abs() + 2, large)


def once(x: Tensor) -> Tensor:
    return x / 0 if next(CALLS) == FIRST_BAD_STEP else x


# Faults that a replay must name, each with its phase and operation.
FAULTS = {
    "root": (lambda x: x + torch.sqrt(-1 - x.abs()), "forward", "aten.sqrt"),
    "logarithm": (lambda x: x * torch.log(-x.abs()), "forward", "aten.log"),
    "division": (lambda x: x / (x - x), "forward", "aten.div"),
    "arc": (lambda x: x + torch.acos(2 + x.abs()), "forward", "aten.acos"),
    "backward_only": (lambda x: x + torch.sqrt((x - x).abs()), "backward", "aten.div"),
    "product": (
        lambda x: x * (torch.finfo(x.dtype).max * (1 + x.abs()) / (1 + x.abs())) * 60,
        "forward",
        "aten.mul",
    ),
    "exponential": (lambda x: x + torch.exp(x.abs() + 200), "forward", "aten.exp"),
    "half": (lambda x: x + (x.float() + 1e6).half().to(x.dtype), "forward", "aten._to_copy"),
    "matrix": (matrix, "forward", "aten."),
    "growing": (lambda x: x * 400, "spike", ""),
    "shifted": (lambda x: x - 900 * x.detach().sign(), "spike", ""),
}
CHANGING = {
    "clock": lambda x: x * (1 + time.time_ns() % 9973 / 1e6),
    "entropy": lambda x: x + int.from_bytes(os.urandom(2), "little") / 1e7,
    # Far apart for consecutive numbers, so that no rounding makes them equal.
    "process": lambda x: x + os.getpid() * 7919 % 9973 / 1e4,
    "counter": lambda x: x + next(CALLS) / 1e4,
    "once": once,
}


def build(name: str, fault: str, seed: int) -> tuple[nn.Module, list[Any], Fault, str]:
    """Build a model with a fault behind the module that the seed chooses, and its samples.

    The path of the fault comes last.
    """
    places = PLACES[name]
    change = CHANGING.get(fault) or FAULTS[fault][0]
    planted = Fault(change, always=fault in CHANGING)
    torch.manual_seed(seed)
    model, samples = MODELS[name]()
    # Behind the last place no norm takes the size away, so that the loss is a spike.
    is_spike = FAULTS.get(fault, (None, ""))[1] == "spike"
    place = places[-1] if is_spike else places[seed % len(places)]
    parent, _, child = place.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, child, nn.Sequential(owner.get_submodule(child), planted))
    return model, samples, planted, f"{place}.1"


def main(name: str, fault: str, seed: str) -> None:
    model, samples, planted, _ = build(name, fault, int(seed))
    # Of each kind half of the models compute in another type.
    precision = (torch.float32, torch.bfloat16)[int(seed) // 5 % 2]
    model.to(precision)
    first = BATCH_SIZE * (FIRST_BAD_STEP - 1)
    marked = range(first, first + 3 * BATCH_SIZE)
    batches = DataLoader([(*it, i in marked) for i, it in enumerate(samples)], BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = saving(
        *(model, optimizer),
        runs="run",
        rollback_every=4,
        spike={"window": 16, "threshold": 20.0},
        box={"keep": 1},
    )
    with contextlib.closing(run):
        for x, labels, is_marked in run.batches(batches):
            # Make the loss of marked samples infinite, so that their step is kept in a box.
            planted.is_marked = bool(is_marked.any())
            output = model(x.to(precision) if x.is_floating_point() else x).float()
            if fault in CHANGING and fault != "once" and planted.is_marked:
                output = output / 0
            loss = F.cross_entropy(output.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            if run.steps == FIRST_BAD_STEP + 3:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
