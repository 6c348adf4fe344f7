"""One more option never makes a plan slower, for random models, cards, budgets and options.

python -m pytest tests/plan/test_never_slower.py
"""

import random

import pytest

from curry_train.plan import Infeasible, Planner, plan
from curry_train.plan.saved import OPTION_KINDS
from curry_train.workloads.models import mlp, resnet, transformer

from ..plan_models import net

KINDS = [kind for kind in OPTION_KINDS if kind != "none"]
MODELS = {
    "equal blocks": lambda draw: net(*[64] * draw.randint(2, 5)),
    "two kinds": lambda draw: net(*draw.choices((32, 128, 256), k=4)),
    "loop": lambda draw: net(64, 96, times=draw.randint(2, 3)),
    "mlp": lambda draw: mlp(depth=draw.randint(3, 6), width=128),
    "resnet": lambda draw: resnet(depth=3, width=16, size=8),
    "language model": lambda draw: transformer(
        depth=2, dim=32, vocabulary=draw.choice((64, 1024)), length=32
    ),
}


def step_seconds(workload, budget, batch, *, by_reserved=False, **options):
    try:
        found = plan(workload, budget, global_batch=batch, by_reserved=by_reserved, **options)
    except Infeasible:
        return float("inf")
    assert found.peak_bytes <= budget
    return found.step_seconds


def case(seed):
    """Draw a workload, a budget below the plain peak, and options for it."""
    draw = random.Random(seed)
    workload = MODELS[draw.choice([*MODELS])](draw)
    batch = 4
    options = {
        "device": draw.choice(("cpu", "rtx4090")),
        "without": tuple(draw.sample(KINDS, draw.randint(1, 2))),
    }
    with Planner(workload, by_reserved=False, **options) as planner:
        plain = planner.sketch.step(batch).peak_bytes
        state = planner.sketch.step(1).fixed
    return draw, workload, round(state + draw.uniform(0.3, 1) * (plain - state)), batch, options


SEEDS = [pytest.param(seed, marks=[pytest.mark.long] * bool(seed)) for seed in range(130)]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_option_more_never_makes_a_plan_slower(seed):
    draw, workload, budget, batch, options = case(seed)
    best = step_seconds(workload, budget, batch, **options)
    # Of the settings with one option less, one is drawn.
    fewer = [{"without": (*options["without"], kind)} for kind in KINDS]
    fewer += [{"chunked_loss": False}, {"microbatch": 1}, {"microbatch": batch}]
    left_out = draw.choice(fewer)
    assert best <= step_seconds(workload, budget, batch, **options | left_out), left_out


def test_a_larger_budget_never_makes_a_plan_slower():
    """Also where the allocator reserves more than the chain of blocks expects."""
    options = {"device": "rtx4090", "microbatch": 4096, "by_reserved": True}
    less, more = (
        step_seconds(net(*[256] * 5), budget, 4096, **options)
        for budget in (2_375_000_000, 2_770_000_000)
    )
    assert more <= less
