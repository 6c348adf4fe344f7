"""A step as CUDA runs it: what torch's allocator reserves, from shapes.

python -m pytest tests/plan/test_cuda_step.py
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from curry_train.plan import Infeasible, Plan, Planner, Sketch, plan
from curry_train.plan.cuda_allocator import CudaAllocator
from curry_train.plan.cuda_step import (
    CONTEXT_BYTES,
    CUDNN_BYTES,
    HOPPER_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    TrainingReplay,
    cuda_memory,
    in_order_of_moving,
    workspace_of,
)
from curry_train.plan.saved import OPTION_KINDS
from curry_train.workloads import Workload
from curry_train.workloads.models import mlp

from ..command_runs import ran, read_json
from ..plan_models import (
    MomentsInATuple,
    MomentsMadeAnew,
    estimated,
    squares,
    trace_of,
    trace_of_sizes,
)
from ..toy_steps import square_sum, stacked

MIB = 2**20
WIDTH = 1024
LAYER_BYTES = WIDTH * WIDTH * 4


def layers(optimizer=None, *, rows=8, depth=2):
    """Layers of exactly 4 MiB without biases."""

    made = squares(lambda: stacked(lambda: nn.Linear(WIDTH, WIDTH, bias=False), depth), rows, WIDTH)
    return replace(made, optimizer=optimizer)


def test_the_trace_of_a_linear_step_by_hand():
    trace = trace_of(layers(torch_sgd, depth=1))
    x = 8 * WIDTH * 4
    assert [life.nbytes for life in trace.given] == [LAYER_BYTES, x]
    assert not trace.state
    assert [life.nbytes for life in trace.gradients] == [LAYER_BYTES]
    made = [life.nbytes for life, is_made in trace.events if is_made]
    # Output, its square, the sum and the division; then the seed and three gradients.
    assert made.count(LAYER_BYTES) == 1
    assert made[0] == x
    assert len(trace.products) == 2


def test_tensors_are_given_in_the_order_in_which_a_module_moves_them():
    module, moved = nn.Sequential(nn.BatchNorm1d(2), nn.PReLU()), []
    module._apply(lambda tensor: moved.append(tensor) or tensor)
    assert list(map(id, in_order_of_moving(module))) == list(map(id, moved))


def torch_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_sizes_are_rounded_and_each_thread_has_a_workspace():
    trace = trace_of_sizes((1000, 100), (1, ~1), given=(0,), products=(0, 1))
    found = cuda_memory(trace)
    assert found.allocated_bytes == 1024 + 512 + 2 * WORKSPACE_BYTES
    assert workspace_of("rtx4090") == WORKSPACE_BYTES
    large = cuda_memory(trace, workspace_bytes=workspace_of("NVIDIA H200"))
    assert large.allocated_bytes - found.allocated_bytes == 2 * (
        HOPPER_WORKSPACE_BYTES - WORKSPACE_BYTES
    )


def test_the_callers_output_lives_until_the_next_one():
    """Two outputs are there at once in the second forward, as in a script that rebinds logits."""
    allocator = CudaAllocator()
    replay = TrainingReplay(trace_of_sizes((4 * MIB,), (0,)), allocator)
    replay.step()
    assert (allocator.allocated, allocator.peak_allocated) == (4 * MIB, 4 * MIB)
    replay.step()
    assert (allocator.allocated, allocator.peak_allocated) == (4 * MIB, 8 * MIB)


@pytest.mark.parametrize(("until", "held"), [("loss", 0), ("step", 0), ("next step", 1)])
def test_a_function_that_returns_frees_the_output_it_held(until, held):
    logits = 1024 * WIDTH * 4
    workload = replace(layers(torch_sgd, rows=1024), output_until=until)
    allocator = CudaAllocator()
    replay = TrainingReplay(trace_of(workload), allocator)
    before = allocator.allocated
    for _ in range(2):
        replay.step()
    of_both = 2 * WORKSPACE_BYTES + 2 * LAYER_BYTES  # gradients are there until the next step
    # The loss is held like the output.
    assert allocator.allocated - before - of_both in range(held * logits, held * logits + 1024)
    peaks = []
    for kernels in ("cuda", "cpu"):
        peaks.append(estimated(workload, 1, kernels=kernels).timeline.after["backward"])
    assert peaks[0] - peaks[1] == (0 if until == "loss" else logits)


def test_another_end_is_refused():
    with pytest.raises(ValueError, match="got 'forward'"):
        replace(layers(), output_until="forward")


def test_gradients_are_freed_before_the_next_forward():
    """An output of 4 MiB has a gradient of 8 MiB, which lives until the next step."""
    trace = trace_of_sizes((4 * MIB, 8 * MIB), (0, 1, ~0), gradients=(1,))
    assert cuda_memory(trace).allocated_bytes == 12 * MIB


# The optimizer is the user's own.


def test_the_users_optimizer_copies_all_parameters_for_a_moment_unless_it_is_fused():
    def peak(**options):
        workload = layers(lambda one: torch.optim.AdamW(one.parameters(), **options), depth=8)
        return cuda_memory(trace_of(workload)).allocated_bytes

    assert peak() == peak(foreach=True) > peak(foreach=False) > peak(fused=True)
    assert peak() - peak(fused=True) >= 6 * LAYER_BYTES


@pytest.mark.parametrize("optimizer", [MomentsMadeAnew, MomentsInATuple])
def test_state_that_is_made_anew_does_not_pile_up(optimizer):
    trace = trace_of(layers(optimizer, depth=4))
    few = cuda_memory(trace, num_steps=2)
    assert few.allocated_bytes == cuda_memory(trace, num_steps=6).allocated_bytes
    assert len(trace.state) == 8


def test_an_optimizer_of_a_factory_that_returns_something_else_is_an_error():
    sketch = Sketch(layers(lambda module: module), kernels="cuda")
    with pytest.raises(ValueError, match="factory returned Sequential"), sketch:
        pass


# Devices.


def test_a_plan_fits_by_what_is_reserved_and_the_context():
    with Planner(
        mlp(depth=3, width=512), device="rtx4090", chunked_loss=False, without=("sac", "regions")
    ) as planner:
        found = planner.plan(2**30, global_batch=4)
        figures = found.cuda
        assert found.peak_bytes == figures["reserved_bytes"] + CONTEXT_BYTES
        assert figures["allocated_bytes"] <= figures["reserved_bytes"]
        assert figures["limit_bytes"] == 2**30
        assert "reserved" in found.explain()
        assert Plan.from_json(json.loads(json.dumps(found.to_json()))).cuda == figures
        with pytest.raises(Infeasible, match="nothing fits"):
            planner.plan(CONTEXT_BYTES + figures["allocated_bytes"] // 2, global_batch=4)


def test_expandable_segments_are_the_first_lever_where_they_make_it_fit():
    settings = {"device": "rtx4090", "chunked_loss": False, "context_bytes": 0}
    without = [kind for kind in OPTION_KINDS if kind != "none"]
    with Planner(layers(rows=700, depth=12), without=without, **settings) as planner:
        figures = planner.plan(2**40, global_batch=4, microbatch=4).cuda
        budget = (figures["expandable_reserved_bytes"] + figures["reserved_bytes"]) // 2
        with pytest.raises(Infeasible) as raised:
            planner.plan(budget, global_batch=4, microbatch=4)
    levers = str(raised.value).replace("\n    ", " ").split("\n  ")
    assert levers[2].startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, at no cost")
    assert levers[2].endswith("which fits")


def test_the_budget_of_a_card_is_what_cuda_gives_of_it():
    settings = {"device": "rtx4090", "chunked_loss": False, "context_bytes": 2**30}
    found = plan(mlp(depth=2, width=64), 24 * 2**30, global_batch=2, **settings)
    assert found.cuda["limit_bytes"] == round(23.6 * 2**30)
    assert found.peak_bytes == found.cuda["reserved_bytes"] + 2**30


def test_the_command_writes_the_figures_and_takes_the_users_optimizer(tmp_path, monkeypatch):
    (tmp_path / "own_optimizer.py").write_text(
        "import torch\n\ndef fused(module):\n"
        "    return torch.optim.AdamW(module.parameters(), fused=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    options = "--optimizer own_optimizer:fused --json plan.json"
    ran("plan --model mlp --budget 2GiB --target l4", options)
    written = read_json("plan.json")
    first, last = (written[f"{name}reserved_bytes"] for name in ("first_step_", ""))
    assert 0 < written["allocated_bytes"] <= first <= last
    assert written["expandable_reserved_bytes"] > 0
    assert written["plan"]["settings"]["optimizer"] == "own_optimizer:fused"


def test_a_gate_plans_by_tensors_alone():
    with Planner(
        mlp(depth=3, width=64), device="h100", chunked_loss=False, by_reserved=False
    ) as planner:
        found = planner.plan(2**30, global_batch=2)
        assert found.peak_bytes == planner.sketch.step(found.microbatch).peak_bytes
    assert found.cuda is None


# Workspaces of convolutions, and what the search for their algorithms changes.


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


@pytest.mark.parametrize(
    ("channels", "window", "copies"),
    [
        # An activation has 262,144 bytes and the weight 36,864. Forward copies nothing; the
        # gradients copy the weight and one activation, or both.
        (32, 3, [0, 299_008, 561_152]),
        # With 1,048,576 and 589,824 bytes, forward copies the input and the weight, too, and
        # the gradient of the input is copied in place of the weight.
        (128, 3, [1_638_400, 2_097_152, 2_686_976]),
        # Windows of one pixel have 8,388,608 and 4,194,304 bytes.
        (1024, 1, [0, 12_582_912, 20_971_520]),
    ],
)
def test_the_output_and_both_gradients_copy_what_they_read(channels, window, copies):
    model = images(
        lambda: stacked(lambda: nn.Conv2d(channels, channels, window, padding=window // 2), 2),
        channels=channels,
    )
    assert [num_bytes for _, num_bytes in workspaces(model)][1:4] == copies


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
