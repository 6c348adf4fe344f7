"""Ranks with experts peak as real processes do, with tokens that are spread evenly.

python -m pytest tests/plan/test_routed_ranks.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from curry_train.plan import Sharding, Sketch
from curry_train.plan.rank_step import EvenRouting

from ..plan_models import estimated
from ..rank_calls import run_on_ranks
from . import routed_ranks
from .routed_ranks import WIDTH, moe_net, routed

# The second one does not divide evenly among four experts.
BATCH_SIZES = (64, 33)
ROUTED = ["fsdp2", "shared", "shared, called"]


@pytest.fixture(scope="module")
def real():
    """Measure real ranks on gloo."""
    return run_on_ranks(f"{Path(__file__).resolve()}:measure_real")


def measure_real():
    return {
        name: [routed_ranks.measure(name, batch_size) for batch_size in BATCH_SIZES]
        for name in ROUTED
    }


@pytest.mark.parametrize("name", ROUTED)
def test_a_rank_with_experts_peaks_as_a_real_process_with_an_even_routing(real, name):
    workload, sharding = routed_ranks.program(name, rank=1)
    with Sketch(workload, sharding=sharding) as sketch:
        found = [sketch.step(batch_size).peak_bytes for batch_size in BATCH_SIZES]
    assert found == real[1][name]


def test_tokens_are_spread_evenly():
    model = moe_net()
    with EvenRouting():
        with torch.no_grad():
            model(torch.randn(16, WIDTH))
        assert [block.counts for block in model] == 2 * [[8, 8, 8, 8]]
        model(torch.randn(32, WIDTH)).sum().backward()
    assert [block.counts for block in model] == 2 * [[16, 16, 16, 16]]
    # The scores are the model's own, so the router is trained.
    assert model[0].router.weight.grad.abs().sum() > 0


def test_a_rank_whose_shapes_depend_on_other_values_is_refused_in_one_line():
    def positive(module, batch):
        rows = module(batch)
        return rows[rows[:, 0] > 0].square().sum()

    workload = replace(routed(), loss=positive)
    with pytest.raises(ValueError, match=r"from shapes alone: aten\.nonzero"):
        estimated(workload, 4, sharding=Sharding("fsdp2", 2))


def late(model, mesh):
    model.register_forward_hook(lambda module, inputs, rows: rows[rows[:, 0] > 0])


def test_values_that_only_the_wrapped_model_needs_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"from shapes alone: aten\.nonzero") as refused:
        estimated(routed(), 4, sharding=Sharding(late, 2))
    assert len(str(refused.value).splitlines()) == 1
