"""Models with experts: tokens are spread evenly over them on ranks.

python -m pytest tests/plan/test_routing_peaks.py
"""

from dataclasses import replace

import pytest
import torch

from curry_train.plan import Sharding
from curry_train.plan.rank_step import EvenRouting

from ..plan_models import estimated
from .routed_ranks import WIDTH, moe_net, routed


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
