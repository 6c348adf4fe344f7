"""Neighbouring blocks that are run in different ways are still the same training.

python -m pytest tests/plan/test_mixed_options.py
"""

import itertools

import pytest

from curry_train.core.blocks import find_blocks
from curry_train.gates.same_training import same_training
from curry_train.plan.saved import Option, apply_options
from curry_train.workloads import Case
from curry_train.workloads.models import mlp

# One case, whose plain training is kept.
CASE = Case(mlp(depth=4, width=32))
OPTIONS = {
    "full": Option("full"),
    "regions": Option("regions"),
    "sac": Option("sac", frozenset({("matmul", 0)})),
    "offload": Option("offload"),
}


@pytest.mark.parametrize("pair", list(itertools.permutations(OPTIONS, 2)), ids="-".join)
def test_alternating_options_leave_the_training_unchanged(pair):
    """Cover regions that could rebuild the last activation of the previous `mlp` block."""

    def apply(model, sample):
        chosen = {block: OPTIONS[pair[place % 2]] for place, block in enumerate(find_blocks(model))}
        return apply_options(model, chosen)

    _, _, hint = same_training(CASE, apply)
    assert not hint
