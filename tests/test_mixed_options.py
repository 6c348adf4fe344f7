"""Neighbouring blocks that are run in different ways are still the same training.

python -m pytest tests/test_mixed_options.py
"""

import itertools

import pytest

from curry_train.core.blocks import find_blocks
from curry_train.core.load import load_workload
from curry_train.core.workload import Case
from curry_train.plan.options import FULL, OFFLOAD, REGIONS, SAC, Option, apply_options
from curry_train.plan.same_training import same_training

OPTIONS = {
    FULL: Option(FULL),
    REGIONS: Option(REGIONS),
    SAC: Option(SAC, frozenset({("matmul", 0)})),
    OFFLOAD: Option(OFFLOAD),
}


@pytest.mark.parametrize("pair", list(itertools.permutations(OPTIONS, 2)), ids="-".join)
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_two_ways_in_turns(name, pair):
    """An `mlp` block ends in an activation, which the next block's regions could make from what the first one saved."""

    def apply(model, sample):
        chosen = {block: OPTIONS[pair[place % 2]] for place, block in enumerate(find_blocks(model))}
        return apply_options(model, chosen)

    verdict = same_training("mixed", Case(load_workload(name)), apply)
    assert verdict.passed, verdict
