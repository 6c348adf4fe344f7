"""The state whose checkpoints `format_1/` holds, as the package wrote them in format 1.

Proof: `python -m pytest tests/runs/test_store_formats.py`.
"""

from typing import Any

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
