"""Measure a whole step to the byte, the owners of its peak, its picture, and the command.

python -m pytest tests/plan/test_timeline.py
"""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from curry_train.core.measure import measure_memory
from curry_train.plan import measure_timeline
from curry_train.primitives import recompute_blocks
from curry_train.workloads.models import BUILTIN_WORKLOADS

from ..command_runs import ran, require_narrow, require_picture
from ..peers.peer_table import torch_checkpoints
from ..plan_models import built
from ..toy_steps import square_sum
from ..unchanged import unchanged

OTHER = nn.Linear(8, 8)
BEFORE = ("parameters", "buffers and batch", "optimizer state")


def at(timeline, point):
    place = timeline.points.index(point)
    return {group: figures[place] for group, figures in timeline.owners.items()}


def at_end(module, batch, **options):
    timeline = measure_timeline(module, batch, square_sum, **options)
    return at(timeline, timeline.points[-1])


# Figures by hand and against other instruments.


def test_a_small_step_by_hand():
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Sigmoid())
    timeline = measure_timeline(module, torch.randn(4, 8), square_sum)
    weight = 8 * 16 * 4
    batch = 4 * 8 * 4
    matrix = 4 * 16 * 4
    moments = 2 * weight + 4  # two moments and the step
    ends = {point.phase: point for point in timeline.points}
    assert timeline.after == {phase: point.bytes_alive for phase, point in ends.items()}
    held = {"parameters": weight, "buffers and batch": batch, "optimizer state": moments}
    assert at(timeline, ends["forward"]) == held | {
        "gradients": 0,
        "activations": matrix + 4,
        "temporaries": 0,
    }
    # The loss is still alive after backward, as in a training loop.
    assert at(timeline, ends["backward"]) == held | {
        "gradients": weight,
        "activations": 4,
        "temporaries": 0,
    }
    assert at(timeline, ends["step"]) == at(timeline, ends["backward"])
    assert timeline.peak.phase == "step"  # the optimizer's temporaries on top of all gradients
    assert timeline.peak.owners == held | {
        "gradients": weight,
        "activations": 4,
        "temporaries": 2 * weight,
    }
    assert timeline.peak.layers == {"(rest)": 4}


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_held_and_peak_bytes_are_those_of_measure_memory(name):
    module, batch, loss = built(name)
    recompute_blocks(module)
    timeline = measure_timeline(module, batch, loss)
    assert len(timeline.points) > 50
    assert all(min(figures) >= 0 for figures in timeline.owners.values())
    peak = timeline.peak
    assert peak.bytes_alive == max(point.bytes_alive for point in timeline.points)
    assert sum(peak.layers.values()) == peak.owners["activations"]
    there = sum(timeline.owners[group][0] for group in BEFORE)
    memory = measure_memory(module, batch, loss)
    assert timeline.after["forward"] - there == memory.held_bytes
    highest = max(point.bytes_alive for point in timeline.points if point.phase != "step")
    assert highest - there == memory.peak_bytes


# Owners of bytes.


def test_tied_weights_and_buffers_count_once():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    module.register_buffer("seen", module[0].weight.detach())
    end = at_end(module, torch.randn(4, 8))
    assert (end["parameters"], end["gradients"], end["buffers and batch"]) == (256, 256, 128)


def test_sparse_gradients_are_gradients():
    module = nn.Sequential(nn.Embedding(50, 8, sparse=True))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    end = at_end(module, torch.tensor([[1, 2]]), optimizer=sgd)
    assert end["gradients"] == 2 * 8 * 4 + 2 * 8  # two rows, and their numbers


@pytest.mark.parametrize("change", [recompute_blocks, torch_checkpoints])
def test_recomputed_tensors_are_activations_of_their_layer(change):
    module, batch, loss = built("transformer")
    change(module)
    peak = measure_timeline(module, batch, loss).peak
    assert peak.phase == "backward"
    one_block = 2.2 * 2**20
    alone = [name for name, held in peak.layers.items() if held > 0.9 * one_block]
    assert alone == ["layers.0"]  # the last block to be recomputed, when the most gradients exist


# Side effects and errors.


@pytest.mark.parametrize("fails", [False, True])
def test_weights_gradients_and_the_optimizer_are_unchanged(fails):
    module, batch, loss = built("resnet")
    module.eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    # It replaces the optimizer's own step, which a copy must not call.
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss(module, batch).backward()
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    with (
        unchanged(module),
        pytest.raises(ValueError, match="it has shape") if fails else nullcontext(),
    ):
        measure_timeline(
            module,
            batch,
            (lambda *given: loss(*given).expand(2)) if fails else loss,
            optimizer=optimizer,
        )
    torch.testing.assert_close(optimizer.state_dict()["state"], kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lambda m, x: m(x)}, r"one number.*it has shape \(4, 8\)"),
        ({"loss": lambda m, x: m(x).sum().detach()}, "requires_grad=False"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            "holds no parameter of Linear",
        ),
        (
            {"loss": lambda _, batch: OTHER(batch).sum()},
            "no gradient in Linear: let the loss use the module that it gets",
        ),
    ],
)
def test_wrong_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        measure_timeline(nn.Linear(8, 8), torch.randn(4, 8), **({"loss": square_sum} | options))


@pytest.mark.cuda
def test_on_cuda_the_points_are_the_allocators():
    module, batch, loss = built("transformer", device=torch.device("cuda"), batch_size=32)
    timeline = measure_timeline(module, batch, loss)
    there = timeline.points[0].bytes_alive
    memory = measure_memory(module, batch, loss)
    assert timeline.after["forward"] - there == pytest.approx(memory.held_bytes, rel=0.05)
    assert (
        sum(timeline.peak.owners.values()) == timeline.peak.bytes_alive >= there + memory.peak_bytes
    )
    assert timeline.peak.owners["allocator"] < 0.2 * timeline.peak.bytes_alive


# The picture and the command.


def test_memory_shows_the_layers_the_peak_and_the_course_in_80_columns(tmp_path):
    ended = ran("memory --model transformer --device cpu --json - --plot", tmp_path / "step.png")
    data = json.loads(ended.stdout)
    assert {"command", "device", "dtype", "seed"} <= set(data)
    layers = data["profile"]["layers"]
    assert data["profile"]["held_bytes"] == sum(layer["bytes"] for layer in layers)
    peak = data["timeline"]["peak"]
    assert peak["bytes_alive"] == sum(peak["owners"].values())
    for message in (
        "layers.3",
        "(rest)",
        "after forward 21.362",
        "peak 22.362 in backward",
        "optimizer state",
    ):
        assert message in ended.stderr
    require_narrow(ended.stderr)
    require_picture(tmp_path / "step.png")
