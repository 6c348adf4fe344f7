"""Rows of a data set of measurements: which ones are compared, and with what.

python -m pytest tests/benchmarks/test_gpumemnet.py
"""

import csv
import sys

import torch
from torch import nn

import gpumemnet

from ..command_runs import read_json
from ..plan_models import squares

MLP = {
    "input_features": "8",
    "layers": "linear:6 batch_normalization:6 ReLU:6 dropout:6 linear:4 Softmax:4",
    "dropout_rate": "0.25",
    "batch_size": "16",
}


def small(name):
    return squares(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), 3, 12, 12, name=name)


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
    found = read_json(path)
    assert (found["mlp"]["num_rows"], found["timm"]["num_rows"]) == (2, 3)
    assert not torch.backends.cudnn.benchmark
    # The last run failed.
    assert not gpumemnet.settled({8: 1708, 16: 1716, 32: 1732, 64: 1700})


def test_readings_of_a_search_are_left_out():
    # A line that starts at 20 GB is no training's, whatever its slope.
    assert gpumemnet.settled({8: 2800, 16: 3600, 32: 5200}) == [8, 16, 32]
    assert not gpumemnet.settled({8: 20_800, 16: 21_600, 32: 23_200})
