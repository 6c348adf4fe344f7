"""The overhead of a technique in a figure that a busy machine does not change: calls of Python functions in one step.

Proof: `python -m pytest tests/test_measure.py`.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .untouched import seeded, untouched
from .workload import Case


def python_calls(case: Case, change: Callable[[nn.Module, Case], Any]) -> int:
    """Calls in one step of a model that `change` has changed, at batch size 1 and on the CPU, where backward stays in
    this thread; a first step has done what is done once."""
    case = replace(case, device=torch.device("cpu"), batch_size=1)
    module, batch, counted = case.build(), case.batch(), [0]
    with seeded(case.seed):
        change(module, case)

    def count(frame: Any, event: str, argument: Any) -> None:
        counted[0] += event == "call"

    with untouched(module):
        case.workload.mean_loss(module, batch).backward()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            case.workload.mean_loss(module, batch).backward()
        finally:
            sys.setprofile(before)
    return counted[0]
