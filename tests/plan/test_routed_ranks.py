"""Ranks with experts peak as real processes do.

python -m pytest tests/plan/test_routed_ranks.py
"""

from pathlib import Path

import pytest

from curry_train.plan import Sketch

from ..rank_calls import run_on_ranks
from . import routed_ranks

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
