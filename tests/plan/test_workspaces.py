"""Workspaces of convolutions, and what the search for their algorithms changes.

python -m pytest tests/plan/test_workspaces.py
"""

import pytest
import torch
from torch import nn

from curry_train.plan.cuda_step import (
    CONTEXT_BYTES,
    CUDNN_BYTES,
    StepTrace,
    context_of,
    cuda_memory,
)
from curry_train.plan.estimate import Sketch
from curry_train.plan.planner import Planner
from curry_train.plan.workspaces import Convolution
from curry_train.workloads.workload import Workload

MIB = 2**20
SIZE = 32


def images(module, *, channels=3, memory_format=torch.contiguous_format):
    return Workload(
        "images",
        lambda: module().to(memory_format=memory_format),
        lambda size: torch.randn(size, channels, SIZE, SIZE).to(memory_format=memory_format),
        lambda module, x: module(x).square().sum(),
    )


def workspaces(workload, **options):
    """Return the kind and the workspace of each call in a step of two images."""
    with Sketch(workload, kernels="cuda", **options) as sketch:
        trace = sketch.step(2).trace
    return [(one.call[0], one.num_bytes) for one in trace.convolutions]


def test_backward_copies_a_convolution_to_channels_last_by_hand():
    """3 channels take the place of 4, and 6 of 8, in copies of input, gradient and weight."""
    numbers = 2 * 4 * SIZE**2 + 2 * 8 * SIZE**2 + 6 * 3 * 9
    model = images(lambda: nn.Conv2d(3, 6, 3, padding=1, bias=False))
    assert workspaces(model) == [("forward", 0), ("weight", 4 * numbers)]
    halves = 2 * 8 * SIZE**2 + 2 * 8 * SIZE**2 + 6 * 3 * 9
    assert workspaces(model, dtype=torch.bfloat16)[1] == ("weight", 2 * halves)


def test_the_gradient_of_the_input_is_a_call_of_its_own():
    model = images(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=2)))
    kinds = [kind for kind, _ in workspaces(model)]
    assert kinds == ["forward", "forward", "input", "weight", "weight"]


@pytest.mark.parametrize(
    "workload",
    [
        images(lambda: nn.Conv2d(8, 8, 1), channels=8),
        images(lambda: nn.Conv2d(8, 8, 3), channels=8, memory_format=torch.channels_last),
        images(lambda: nn.Conv2d(8, 16, 3, groups=8), channels=8),
    ],
    ids=["one pixel", "channels last", "depthwise"],
)
def test_no_copies_where_a_kernel_needs_none(workload):
    assert not any(num_bytes for _, num_bytes in workspaces(workload))


def test_a_workspace_is_reserved_and_free_again():
    """A call of 30 MiB and one of 1 MiB, and after them a tensor of 20 MiB in their place."""
    trace = StepTrace(
        sizes=(MIB, 20 * MIB),
        given=(0,),
        state=(),
        events=(1, ~1),
        step_start=2,
        gradients=(),
        products=(),
        convolutions=(Convolution(0, "input", 30 * MIB), Convolution(0, "weight", MIB)),
    )
    found = cuda_memory(trace)
    assert found.reserved_bytes == 32 * MIB
    assert found.allocated_bytes == 31 * MIB


@pytest.mark.parametrize(("searches", "reserved"), [(False, 100 * MIB), (True, 60 * MIB)])
def test_a_search_gives_the_cache_back_before_the_first_call(searches, reserved):
    """A tensor of 40 MiB dies before the call, and one of 60 MiB is made after it."""
    trace = StepTrace(
        sizes=(40 * MIB, 60 * MIB),
        given=(),
        state=(),
        events=(0, ~0, 1, ~1),
        step_start=4,
        gradients=(),
        products=(),
        convolutions=(Convolution(2, "forward", 0),),
        searches=searches,
    )
    assert cuda_memory(trace).reserved_bytes == reserved


def test_a_step_searches_where_the_users_setting_says_so(monkeypatch):
    model = images(lambda: nn.Conv2d(3, 3, 3))
    assert not trace_of(model).searches
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert trace_of(model).searches


def test_a_plan_names_the_workspace_and_the_kernels_of_cudnn():
    model = images(lambda: nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))))
    with Planner(model, device="h100") as planner:
        plan = planner.plan(4 * 2**30, global_batch=2)
    assert plan.cuda["context_bytes"] == CONTEXT_BYTES + CUDNN_BYTES
    num_bytes = plan.cuda["convolution_workspace_bytes"]
    assert num_bytes == max(one.num_bytes for one in trace_of(model).convolutions)
    assert "convolution workspace, estimated: " in " ".join(plan.explain().split())


def trace_of(model):
    with Sketch(model, kernels="cuda") as sketch:
        return sketch.step(2).trace


def test_a_measured_context_wins():
    assert context_of(trace_of(images(lambda: nn.Conv2d(3, 3, 3))), 7) == 7
