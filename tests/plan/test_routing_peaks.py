"""Peaks of models with experts, by how tokens are spread over them.

python -m pytest tests/plan/test_routing_peaks.py
"""

import math
from dataclasses import replace

import pytest
import torch
from routed_ranks import WIDTH, MoeNet, program, routed
from torch import nn

from curry_train.gates.memory_plan import measured_peak
from curry_train.plan import plan
from curry_train.plan.device import PROFILES
from curry_train.plan.estimate import Sketch
from curry_train.plan.fewest import fewest_gpus
from curry_train.plan.parallel import Sharding
from curry_train.plan.rank_step import ForcedRouting
from curry_train.workloads.workload import Case, Workload

QUICK = {"device": "cpu", "chunked_loss": False, "without": ["sac", "regions", "offload"]}


@pytest.mark.parametrize(
    ("even", "counts"), [(True, [16, 16, 16, 16]), (False, [32, 32, 0, 0])], ids=["even", "worst"]
)
def test_tokens_are_spread_evenly_or_all_go_to_the_same_experts(even, counts):
    model = MoeNet()
    with ForcedRouting(even=even):
        model(torch.randn(32, WIDTH)).sum().backward()
    assert [block.counts for block in model.blocks] == 2 * [counts]
    # The scores are the model's own, so the router is trained.
    assert model.blocks[0].router.weight.grad.abs().sum() > 0


def test_a_plan_states_the_peak_of_an_even_and_of_the_worst_routing():
    found = plan(routed(), 2**30, microbatch=512, global_batch=512, **QUICK)
    peaks = found.settings["routing"]
    # The routing of a new model is nearly even.
    assert math.isclose(peaks["even_bytes"], found.peak_bytes, rel_tol=0.01)
    assert peaks["worst_bytes"] > 1.05 * peaks["even_bytes"]
    # A router that gives all tokens the same scores sends them to the first experts.
    same = Case(routed(lambda: MoeNet(same=True)), batch_size=512)
    assert peaks["worst_bytes"] == measured_peak(same, found.apply)
    assert "all tokens choose the same experts." in " ".join(found.explain().split())
    tight = replace(found, budget_bytes=peaks["even_bytes"])
    assert "over the budget" in " ".join(tight.explain().split())


def test_a_model_without_experts_states_no_routing():
    dense = Workload(
        "dense",
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))),
        lambda size: torch.randn(size, WIDTH),
        lambda module, batch: module(batch[batch[:, 0] > -9]).square().sum(),
    )
    found = plan(dense, 2**30, microbatch=4, global_batch=4, **QUICK)
    assert found.settings["why_real"]
    assert found.settings["routing"] is None


def test_the_fewest_gpus_state_what_the_worst_routing_lacks():
    # Each GPU has 16,384 tokens, of which all may meet on one.
    card = replace(PROFILES["h100"], memory_bytes=2**30, usable_bytes=720 * 2**20)
    workload, sharding = program("shared")
    shared = replace(sharding, mesh={"dp": 1, "ep": 2})
    found = fewest_gpus(workload, card, global_batch=2**14, sharding=shared, most=2)
    (both,) = found.attempts
    assert both.fits
    assert both.peak_bytes < both.limit_bytes < both.worst_routing_bytes
    assert found.to_json()["attempts"][0]["worst_routing_bytes"] == both.worst_routing_bytes
    text = " ".join(found.table().split())
    assert "where all choose those of one GPU, it needs 780 MiB, 60.0 MiB too much." in text


def test_one_gpu_states_no_worst_routing_of_a_model_that_is_measured():
    found = fewest_gpus(routed(), PROFILES["h100"], global_batch=64, most=1)
    assert found.best.worst_routing_bytes is None
    assert "spread evenly" not in found.table()


def test_a_rank_whose_shapes_depend_on_other_values_is_refused_in_one_line():
    def positive(module, batch):
        rows = module(batch)
        return rows[rows[:, 0] > 0].square().sum()

    workload = replace(routed(), loss=positive)
    refused = pytest.raises(ValueError, match=r"from shapes alone: aten\.nonzero")
    with refused, Sketch(workload, sharding=Sharding("fsdp2", 2)):
        pass


def late(model, mesh):
    model.register_forward_hook(lambda module, inputs, rows: rows[rows[:, 0] > 0])


def test_values_that_only_the_wrapped_model_needs_are_refused_in_one_line():
    needs = pytest.raises(ValueError, match=r"from shapes alone: aten\.nonzero")
    with Sketch(routed(), sharding=Sharding(late, 2)) as sketch, needs as refused:
        sketch.step(4)
    assert len(str(refused.value).splitlines()) == 1
