"""The optimizer's step without values is recorded once for each set of trained parameters.

python -m pytest tests/plan/test_optimizer_steps.py
"""

import functools

import pytest
import torch

from curry_train.plan.estimate import Sketch
from curry_train.primitives import recompute_blocks
from curry_train.workloads.models import mlp


def freeze_last(module):
    list(module.parameters())[-1].requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "num_steps"), [(recompute_blocks, 3), (freeze_last, 6)], ids=["same", "others"]
)
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_later_step_equals_the_first_with_its_parameters(
    monkeypatch, change, num_steps, accumulated
):
    """Take two steps to make the state and see whether it is replaced, and one to record."""
    workload = mlp(depth=3, width=32)
    calls = []
    step = torch.optim.AdamW.step
    with Sketch(workload) as alone:
        expected = alone.step(4, change=change, accumulated=accumulated)
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        functools.wraps(step)(lambda self: calls.append(self) or step(self)),
    )
    with Sketch(workload) as sketch:
        sketch.step(2)
        sketch.step(4, accumulated=True)
        found = sketch.step(4, change=change, accumulated=accumulated)
    assert (found.timeline, found.step, found.fixed) == (
        expected.timeline,
        expected.step,
        expected.fixed,
    )
    assert len(calls) == num_steps
    assert found.timeline.peak.bytes_alive > 0
