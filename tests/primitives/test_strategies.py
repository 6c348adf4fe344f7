"""One registry of strategies: commands, plans, levers and configurations are views of it.

python -m pytest tests/primitives/test_strategies.py
"""

import pytest
import torch

from curry_train.primitives.strategies import CONFIGURED_STRATEGIES, CheckpointConfig, apply_config

from ..toy_steps import feed_forward, seeded_stack, square_sum
from .test_running_blocks import PAIRS, PairsInLists


def chain(depth=4):
    return seeded_stack(lambda: feed_forward(8, 32), depth)


BATCH = torch.randn(256, 8)


def test_the_configuration_takes_the_nine_names_of_the_contract():
    assert set(CONFIGURED_STRATEGIES) == {
        "none",
        "full",
        "selective",
        "sequential",
        "sac",
        "regions",
        "offload",
        "memory_budget",
        "plan",
    }
    for name in CONFIGURED_STRATEGIES:
        plan = "plan.json" if name == "plan" else None
        # A file has a list for no patterns, which no strategy ignores.
        assert CheckpointConfig(strategy=name, plan=plan, include_patterns=[]).strategy == name


def test_a_plan_is_applied_by_the_function_that_is_passed_in():
    config = CheckpointConfig(enabled=True, strategy="plan", plan="plan.json")
    assert apply_config(chain(), config, apply_plan=lambda model: ["1"]) == ["1"]
    with pytest.raises(ValueError, match="strategy 'plan' needs a plan"):
        apply_config(chain(), config)
    assert apply_config(chain(), CheckpointConfig(strategy="full")) == []


def test_a_batch_without_its_loss_is_refused():
    with pytest.raises(ValueError, match=r"^batch is given and loss is not: .* needs both$"):
        apply_config(chain(), CheckpointConfig(enabled=True), batch=BATCH)


# Blocks that run, where a batch is at hand.


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("full", {}),
        ("sequential", {"sequential_segments": 2}),
        ("selective", {"memory_threshold_mb": 0.0}),
        ("sac", {}),
        ("offload", {}),
    ],
)
def test_a_configuration_with_a_batch_works_on_blocks_that_run(strategy, more):
    config = CheckpointConfig(enabled=True, strategy=strategy, **more)
    names = apply_config(PairsInLists(), config, batch=torch.randn(64, 24, 8), loss=square_sum)
    assert names
    assert set(names) <= {*PAIRS}


def test_patterns_of_a_configuration_are_over_the_blocks_of_the_containers():
    config = CheckpointConfig(enabled=True, strategy="full", include_patterns=("1",))
    assert apply_config(chain(), config, batch=BATCH, loss=square_sum) == ["1"]
    with pytest.raises(ValueError, match=r"there are layers\.0, layers\.1"):
        apply_config(PairsInLists(), config, batch=BATCH, loss=square_sum)
