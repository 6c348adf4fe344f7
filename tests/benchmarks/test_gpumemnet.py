"""Rows of a data set of measurements: which ones are compared, and with what.

python -m pytest tests/benchmarks/test_gpumemnet.py
"""

import csv
import json
import sys

import pytest
import torch
from torch import nn

import gpumemnet
from curry_train.workloads.workload import Workload

MLP = {
    "input_features": "8",
    "layers": "linear:6 batch_normalization:6 ReLU:6 dropout:6 linear:4 Softmax:4",
    "dropout_rate": "0.25",
    "batch_size": "16",
}


def small(name):
    return Workload(
        name,
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        lambda size: torch.randn(size, 3, 12, 12),
        lambda module, x: module(x).sum(),
    )


@pytest.mark.parametrize(
    ("readings", "sizes"),
    [
        ({8: 2000, 16: 2400, 32: 3200, 64: 4800}, [8, 16, 32, 64]),
        ({8: 2000, 16: 2400, 32: 3200, 64: 2100, 128: 9000}, [8, 16, 32]),
        ({8: 2000, 16: 4000, 32: 5200, 64: 7000, 128: 11000}, [16, 32, 64, 128]),
        ({8: 16000, 16: 27000, 32: 40300}, []),
        ({8: 2301, 16: 2301, 32: 2301}, []),
    ],
    ids=["all", "a run failed", "one reading is off", "the card is full", "no run went well"],
)
def test_readings_are_left_out_by_readings_alone(readings, sizes):
    assert gpumemnet.settled(readings) == sizes


def test_an_mlp_is_built_as_its_row_says():
    found = [type(module).__name__ for module in gpumemnet.build_mlp(MLP)]
    assert found == ["Linear", "BatchNorm1d", "ReLU", "Dropout", "Linear", "Softmax"]
    assert gpumemnet.build_mlp(MLP)[4].weight.shape == (4, 6)


def test_the_constant_is_left_out_of_the_errors():
    rows = [
        {"model": name, "measured_mib": 1000.0 + reserved + more, "reserved_mib": reserved}
        for name, reserved, more in (("a", 500, 0), ("b", 900, 0), ("b", 1000, 200))
    ]
    found = gpumemnet.summary(rows)
    assert found["constant_mib"] == 1000
    assert (found["num_rows"], found["models"], found["above_6_percent"]) == (3, 2, 1)
    assert found["worst_error"] == round(200 / 2200, 4)


def test_a_folder_is_compared_and_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(gpumemnet, "workload_of", small)
    for name, rows in {
        "mlp": [MLP | {"measured_mib": size} for size in (1700, 1900, 2000)],
        "timm": [
            {"timm_model": "small", "batch_size": size, "measured_mib": 1700 + size}
            for size in (8, 16, 32)
        ],
    }.items():
        with (tmp_path / f"{name}.csv").open("w") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpumemnet.py", str(tmp_path), "--json", str(path)])
    gpumemnet.main()
    found = json.loads(path.read_text())
    assert (found["mlp"]["num_rows"], found["timm"]["num_rows"]) == (2, 3)
    assert not torch.backends.cudnn.benchmark
