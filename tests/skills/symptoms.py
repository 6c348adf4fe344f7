"""Helpers of the tests of symptom tables: a marker for the covered row, and small models.

Proof: `python -m pytest tests/skills/test_symptoms_recompute.py`.
"""

import ast
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from tree import ROOT

from curry_train.core.measure import Memory, measure_memory
from curry_train.core.parity import StepRecord, record_step

WIDTH = 16
linear = partial(nn.Linear, WIDTH, WIDTH)


def symptom(row: str) -> Callable[[Any], Any]:
    """Mark the row of the skill's table, by its first column, that a test reproduces and cures."""
    return lambda test: test


def rows_of(skill: str) -> list[str]:
    """Return the first column of a skill's symptom table."""
    section = (
        (ROOT / "skills" / skill / "SKILL.md").read_text(encoding="utf-8").split("## Symptoms\n")[1]
    )
    lines = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ")[0] for line in lines[1:]]


def rows_with_a_test(technique: str) -> list[str]:
    """Return the rows that the tests in `test_symptoms_<technique>*.py` mark."""
    return [
        ast.literal_eval(decorator.args[0])
        for path in (ROOT / "tests/skills").glob(f"test_symptoms_{technique}*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "symptom"
    ]


def seeded(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a model with the same random numbers each time."""
    torch.manual_seed(0)
    return build(*args, **kwargs)


def blocks(*layers: Callable[[], nn.Module], depth: int = 8) -> nn.Sequential:
    """Build a chain of equal blocks; `layers` build one block."""
    return seeded(
        lambda: nn.Sequential(
            *[nn.Sequential(*[layer() for layer in layers]) for _ in range(depth)]
        )
    )


def rows(size: int = 32) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1))


def mean_square(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


def step(module: nn.Module, batch: Tensor) -> StepRecord:
    """Run one step with every generator at the same seed."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return record_step(module, batch, mean_square)


def memory(
    module: nn.Module, batch: Any, *, loss: Callable[[nn.Module, Any], Tensor] = mean_square
) -> Memory:
    return measure_memory(module, batch, loss)
