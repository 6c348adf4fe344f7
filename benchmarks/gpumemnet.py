"""Compare estimates with public measurements of a real card, those of GPUMemNet.

    .venv/zoo/bin/python -m pip install --no-deps --target .venv/timm timm==1.0.9
    PYTHONPATH=.venv/timm .venv/zoo/bin/python benchmarks/gpumemnet.py FOLDER --json PATH

That version of timm is the first that has all models of the rows; later ones have changed some.
FOLDER has `mlp.csv` and `timm.csv` from the data set of GPUMemNet (IT University of Copenhagen,
2025, CC BY-NC 4.0): what nvidia-smi showed of an A100 of 40 GB while a model trained alone on it,
at one reading a second. The version of torch is unknown. The MLPs trained with Adam. Of the models
of timm it is unknown too how they trained; what fits is timm's own script: SGD with momentum, a
search by cuDNN in the first step, and a loader that holds three batches.

A reading includes the CUDA context and what else the machine used. That is one constant for each
file, fitted here for the least mean error; its spread and the errors that remain are the result.

Left out by the readings alone: small MLPs, whose reading is mostly the constant; runs on a card
that was full; a model of which a run failed although there was room, because it needs no more at a
batch size than at a smaller one; and readings of moments in which cuDNN tried its algorithms: those
5% away from the line through the others of the model, and all of a model where that line starts
above what a training takes without any samples.

Proof: `python -m pytest tests/benchmarks/test_gpumemnet.py`.
"""

import csv
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.plan.cuda_step import cuda_memory
from curry_train.plan.estimate import Sketch
from curry_train.workloads.workload import Workload
from recording import Figures, record_parser, write_record

# A model with its measured and its reserved MiB.
Row = tuple[str, float, int]

MIB = 2**20
SMALLEST_MLP_MIB = 1_800
FULL_CARD_MIB = 39_000
LARGEST_DEVIATION = 0.05
# The lines of the largest models start at 8,300 MiB; those of readings in a search at 18,100.
LARGEST_START_MIB = 10_000
FEWEST_READINGS = 3
CLASSES = 1_000
# Rows and models that are compared, evenly spaced.
NUM_MLPS = 300
NUM_MODELS = 70


def build_mlp(row: Mapping[str, str]) -> nn.Sequential:
    """Build the model of a row, such as `linear:64 ReLU:64 dropout:64 linear:2 Softmax:2`."""
    layers = []
    width = int(row["input_features"])
    for word in row["layers"].split():
        kind, _, size = word.partition(":")
        if kind == "linear":
            layers.append(nn.Linear(width, int(size)))
            width = int(size)
        elif kind == "batch_normalization":
            layers.append(nn.BatchNorm1d(width))
        elif kind == "dropout":
            layers.append(nn.Dropout(float(row["dropout_rate"])))
        elif kind == "Softmax":
            layers.append(nn.Softmax(dim=1))
        else:
            layers.append(getattr(nn, kind)())
    return nn.Sequential(*layers)


def mlp_workload(row: Mapping[str, str]) -> Workload:
    features = int(row["input_features"])
    classes = build_mlp(row)[-2].out_features
    return Workload(
        "mlp",
        lambda: build_mlp(row),
        lambda size: (torch.randn(size, features), torch.randint(classes, (size,))),
        cross_entropy,
    )


def cross_entropy(module: nn.Module, batch) -> torch.Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of timm's script."""
    return torch.optim.SGD(
        module.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=2e-5
    )


def workload_of(name: str) -> Workload:
    """Return the training of a model of timm, on images of the model's own size."""
    # It declares what timm's import of torchvision needs, and the MLPs need none of them.
    from zoo_models import declare_vision_operators

    declare_vision_operators()
    import timm

    found = timm.get_pretrained_cfg(name)
    if found is None:
        raise ValueError("the size of its images is not known")
    shape = found.input_size

    def batch(size: int):
        # The loader holds two more batches, and the bytes of which it makes one.
        others = [torch.randn(size, *shape) for _ in range(2)]
        raw = torch.empty(size, *shape, dtype=torch.uint8)
        return torch.randn(size, *shape), torch.randint(CLASSES, (size,)), raw, *others

    return Workload(name, lambda: timm.create_model(name), batch, cross_entropy)


def estimate(workload: Workload, optimizer, sizes: Iterable[int]) -> dict[int, int]:
    """Return the MiB that the training of a model reserves, by batch size."""
    with Sketch(workload, kernels="cuda", optimizer=optimizer) as sketch:
        if sketch.why_real:
            raise ValueError(sketch.why_real)
        return {size: cuda_memory(sketch.step(size).trace).reserved_bytes // MIB for size in sizes}


def settled(readings: Mapping[int, float]) -> list[int]:
    """Return the batch sizes whose readings are of trainings that ran; see the module."""
    rising = {}
    for size in sorted(readings):
        if readings[size] > FULL_CARD_MIB or readings[size] <= max(rising.values(), default=0):
            break
        rising[size] = readings[size]
    if len(rising) < FEWEST_READINGS:
        return []
    pairs = itertools.combinations(rising, 2)
    slope = statistics.median((rising[b] - rising[a]) / (b - a) for a, b in pairs)
    start = statistics.median(rising[size] - slope * size for size in rising)
    failed = [size for size in readings if size > max(rising)]
    has_failed = failed and start + slope * min(failed) < FULL_CARD_MIB
    if has_failed or start > LARGEST_START_MIB:
        return []
    near = [
        size
        for size, reading in rising.items()
        if abs(reading - start - slope * size) <= LARGEST_DEVIATION * reading
    ]
    return near if len(near) >= FEWEST_READINGS else []


def summary(rows: list[Row]) -> Figures:
    """Fit the constant of a file, and return the errors that remain."""
    models, *figures = zip(*rows, strict=True)
    measured, reserved = numpy.array(figures)
    beside = measured - reserved
    constant = min(beside, key=lambda one: sum(abs(beside - one) / measured))
    errors = abs(beside - constant) / measured
    return {
        "num_rows": len(rows),
        "models": len({*models}),
        "constant_mib": round(constant),
        "standard_deviation_mib": round(statistics.stdev(beside), 1),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "above_6_percent": int(sum(errors > 0.06)),
    }


def every(items: list[Any], count: int) -> list[Any]:
    """Return at most about this many items, evenly spaced."""
    return items[:: max(1, len(items) // count)]


def measure_mlps(path: Path) -> list[Row]:
    found = csv.DictReader(path.read_text().splitlines())
    read = [row for row in found if float(row["measured_mib"]) > SMALLEST_MLP_MIB]
    rows = []
    for row in every(read, NUM_MLPS):
        # AdamW's step takes the memory of Adam's.
        (reserved,) = estimate(mlp_workload(row), "adamw", [int(row["batch_size"])]).values()
        rows.append((row["layers"], float(row["measured_mib"]), reserved))
    return rows


def measure_timm(path: Path) -> list[Row]:
    torch.backends.cudnn.benchmark = True
    readings = defaultdict(dict)
    for row in csv.DictReader(path.read_text().splitlines()):
        readings[row["timm_model"]][int(row["batch_size"])] = float(row["measured_mib"])
    rows = []
    for name in every([name for name in sorted(readings) if settled(readings[name])], NUM_MODELS):
        try:
            found = estimate(workload_of(name), sgd, settled(readings[name]))
        except (RuntimeError, ValueError) as error:
            print(f"{name} is left out: {error}")
            continue
        rows += [(name, readings[name][size], reserved) for size, reserved in found.items()]
    torch.backends.cudnn.benchmark = False
    return rows


def main() -> None:
    """Compare the rows of a folder with estimates, and print what is left of the difference."""
    parser = record_parser(__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    figures = {
        "mlp": summary(measure_mlps(options.folder / "mlp.csv")),
        "timm": summary(measure_timm(options.folder / "timm.csv")),
    }
    print(figures)
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
