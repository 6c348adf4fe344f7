"""Workspaces of convolutions, and what the search for their algorithms changes.

python -m pytest tests/plan/test_workspaces.py
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from curry_train.plan import Planner
from curry_train.plan.cuda_step import CONTEXT_BYTES, CUDNN_BYTES, cuda_memory
from curry_train.workloads import Workload

from ..plan_models import trace_of, trace_of_sizes
from ..toy_steps import square_sum, stacked

MIB = 2**20
SIZE = 32


def images(module, *, channels=3, memory_format=torch.contiguous_format):
    return Workload(
        "images",
        lambda: module().to(memory_format=memory_format),
        lambda size: torch.randn(size, channels, SIZE, SIZE).to(memory_format=memory_format),
        square_sum,
    )


def workspaces(workload, **options):
    """Return the kind and the workspace of each call in a step of two images."""
    trace = trace_of(workload, 2, **options)
    made = (one for one, is_made in trace.events if is_made)
    return [(one.owner[0], one.nbytes) for one in made if one in trace.convolutions]


def test_backward_copies_a_convolution_to_channels_last_by_hand():
    """3 channels take the place of 4, and 62 of 64: input, gradient and that of the weight."""
    numbers = 2 * 4 * SIZE**2 + 2 * 64 * SIZE**2 + 62 * 4 * 49
    model = images(lambda: nn.Conv2d(3, 62, 7, padding=3, bias=False))
    assert workspaces(model) == [("forward", 0), ("weight", 4 * numbers)]
    halves = 2 * 8 * SIZE**2 + 2 * 64 * SIZE**2 + 62 * 8 * 49
    assert workspaces(model, dtype=torch.bfloat16)[1] == ("weight", 2 * halves)


@pytest.mark.parametrize(
    ("memory_format", "calls"),
    [(torch.contiguous_format, []), (torch.channels_last, ["forward", "weight"])],
)
def test_filters_of_one_channel_are_calls_of_cudnn_in_channels_last_alone(memory_format, calls):
    model = images(lambda: nn.Conv2d(4, 4, 3, groups=4), channels=4, memory_format=memory_format)
    assert workspaces(model) == [(kind, 0) for kind in calls]


def test_windows_of_one_pixel_are_copied_where_they_have_many_channels():
    model = images(lambda: nn.Conv2d(1024, 1024, 1, bias=False), channels=1024)
    numbers = 2 * 2 * 1024 * SIZE**2 + 1024**2
    assert workspaces(model) == [("forward", 0), ("weight", 4 * numbers)]


def test_the_gradient_of_the_input_copies_the_output_gradient_and_the_weight():
    model = images(lambda: stacked(lambda: nn.Conv2d(64, 64, 3, padding=1), 2), channels=64)
    values, weight = 2 * 64 * SIZE**2, 64 * 64 * 9
    of_weight = ("weight", 4 * (2 * values + weight))
    of_input = ("input", 4 * (values + weight))
    assert workspaces(model)[2:] == [of_input, of_weight, of_weight]


def test_the_gradient_of_the_input_is_a_call_of_its_own():
    """A convolution by filters of one channel is none of cuDNN's, with channels first."""
    model = images(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 1), *(nn.Conv2d(4, 4, 3, groups=groups) for groups in (2, 4))
        )
    )
    kinds = [kind for kind, _ in workspaces(model)]
    assert kinds == ["forward", "forward", "input", "weight", "weight"]


@pytest.mark.parametrize(
    "workload",
    [
        # Of one pixel and few channels, with channels side by side already, and of too few filters.
        images(lambda: nn.Conv2d(256, 256, 1), channels=256),
        images(lambda: nn.Conv2d(64, 64, 3), channels=64, memory_format=torch.channels_last),
        images(lambda: nn.Conv2d(3, 32, 3)),
    ],
)
def test_no_copies_where_a_kernel_needs_none(workload):
    assert not any(num_bytes for _, num_bytes in workspaces(workload))


def test_a_workspace_is_reserved_and_free_again():
    """A call of 30 MiB and one of 1 MiB, and after them a tensor of 20 MiB in their place."""
    trace = trace_of_sizes((MIB, 20 * MIB, 30 * MIB, MIB), (2, ~2, 3, ~3, 1, ~1), given=(0,))
    found = cuda_memory(trace)
    assert found.reserved_bytes == 32 * MIB
    assert found.allocated_bytes == 31 * MIB


@pytest.mark.parametrize(("searches", "reserved"), [(False, 100 * MIB), (True, 60 * MIB)])
def test_a_search_gives_the_cache_back_before_the_first_call(searches, reserved):
    """A tensor of 40 MiB dies before the call, and one of 60 MiB is made after it."""
    trace = trace_of_sizes((40 * MIB, 0, 60 * MIB), (0, ~0, 1, ~1, 2, ~2), searches=searches)
    trace = replace(trace, convolutions=[trace.events[2][0]])
    assert cuda_memory(trace).reserved_bytes == reserved


def test_a_step_searches_where_the_users_setting_says_so(monkeypatch):
    model = images(lambda: nn.Conv2d(3, 3, 3))
    assert not trace_of(model, 2).searches
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert trace_of(model, 2).searches


def test_a_plan_names_the_workspace_and_the_kernels_of_cudnn():
    model = images(lambda: stacked(lambda: nn.Conv2d(3, 3, 19, padding=9), 3))
    with Planner(model, device="h100") as planner:
        plan = planner.plan(4 * 2**30, global_batch=2)
    assert plan.cuda["context_bytes"] == CONTEXT_BYTES + CUDNN_BYTES
    trace = trace_of(model, 2)
    num_bytes = plan.cuda["convolution_workspace_bytes"]
    assert num_bytes == max(one.nbytes for one in trace.convolutions) > 0
    assert "convolution workspace, estimated: " in " ".join(plan.explain().split())
    # A measured context wins.
    assert replace(planner.card, context_bytes=7).context(trace) == 7
