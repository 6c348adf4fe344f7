"""A model that no resume restores, because its count of calls is not saved.

Proof: `python -m pytest tests/cli/test_runs_command.py`.
"""

import dataclasses
from typing import Any

from torch import nn
from training_models import tiny


class Forgetful(nn.Module):
    """A model whose output depends on how often it was called in training."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **options: Any) -> Any:
        self.calls += self.training
        return self.inner(*args, **options) * (1 + self.calls / 100)


def forgetful() -> Any:
    workload = tiny()
    return dataclasses.replace(workload, build=lambda: Forgetful(workload.build()))
