"""Ranks with experts peak as real processes do.

python -m pytest tests/plan/test_routed_ranks.py
"""

from pathlib import Path

import pytest
import routed_ranks
from rank_calls import run_on_ranks

from curry_train.plan.estimate import Sketch

# Program, whether the routing is even, and the place of the rank whose experts are chosen else.
ROUTED = [
    ("fsdp2", False, 0),
    ("shared", True, 0),
    ("shared", False, 0),
    ("shared", False, 1),
    ("shared, called", False, 1),
]


@pytest.fixture(scope="module")
def real():
    """Measure real ranks on gloo."""
    target = f"{Path(__file__).resolve()}:measure_real"
    return run_on_ranks(target)


def measure_real():
    return routed_ranks.measure_routed(ROUTED)


@pytest.mark.parametrize("index", range(len(ROUTED)))
def test_a_rank_with_experts_peaks_as_a_real_process_with_an_even_and_the_worst_routing(
    real, index
):
    name, even, place = ROUTED[index]
    workload, sharding = routed_ranks.program(name, rank=place)
    with Sketch(workload, sharding=sharding) as sketch:
        sketch.routing.even = even
        assert sketch.step(routed_ranks.BATCH_SIZE).peak_bytes == real[place][index]


def test_tokens_of_two_ranks_meet_on_one_of_them(real):
    even, worst = real[0][1:3]
    assert worst > 1.5 * even
