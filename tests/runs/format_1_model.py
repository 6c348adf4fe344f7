"""The training whose checkpoints `format_1/` holds, as the package wrote them in format 1.

Proof: `python -m pytest tests/runs/test_store_formats.py`.
"""

from collections import deque
from typing import Any

import numpy
import torch
from torch import nn

from curry_train.runs.random_state import DataPosition
from curry_train.runs.state import TrainingState


class Odd:
    """A part of a state with values of several kinds."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


class Scaled(nn.Linear):
    """A layer with extra state."""

    scale: Any = (1, 2.5)

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def new_format_1_state(seed: int = 0) -> TrainingState:
    torch.manual_seed(seed)
    model = nn.Sequential(Scaled(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    average = torch.optim.swa_utils.AveragedModel(model[1])
    extra = {"odd": Odd(), "data": DataPosition(), "average": average}
    return TrainingState(model, optimizer, extra=extra, config={"lr": 0.01})


def train_format_1(state: TrainingState) -> None:
    """Train three steps on fixed inputs, and fill the odd part."""
    inputs = torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(3):
        state.model(inputs).square().sum().backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()
        state.parts["extra-average"].update_parameters(state.model[1])
        state.step += 1
        state.position += 4
    state.parts["extra-odd"].load_state_dict(
        {
            "recent": deque([1, 2]),
            "array": numpy.arange(4, dtype=numpy.int16),
            "nested": {"again": [torch.ones(2)], 3: (None, float("inf"))},
        }
    )
    state.parts["extra-data"].epoch = 2
