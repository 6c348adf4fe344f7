"""Count the Python calls of one step, a measure of overhead that ignores machine load.

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
    """Count the Python calls in one step of a model after `change` is applied to it.

    The step runs at batch size 1 and on the CPU, where backward stays in this thread. A first step
    that is not counted does the work that happens only once.
    """
    case = replace(case, device=torch.device("cpu"), batch_size=1)
    module = case.build()
    batch = case.batch()
    num_calls = 0
    with seeded(case.seed):
        change(module, case)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    with untouched(module):
        case.workload.mean_loss(module, batch).backward()
        previous = sys.getprofile()
        sys.setprofile(count)
        try:
            case.workload.mean_loss(module, batch).backward()
        finally:
            sys.setprofile(previous)
    return num_calls
