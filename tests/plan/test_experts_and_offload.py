"""Ranks with experts, and with parameters on the host, peak as real processes do.

python -m pytest tests/plan/test_experts_and_offload.py
"""

from pathlib import Path

import offloaded_ranks
import pytest
import routed_ranks
from offloaded_ranks import WAYS, offloaded, small

from curry_train.gates.two_ranks import run_on_ranks
from curry_train.plan.estimate import Sketch
from curry_train.plan.parallel import Sharding
from curry_train.plan.planner import plan

# Program, whether the routing is even, and the place of the rank whose experts are chosen else.
ROUTED = [
    ("fsdp2", True, 0),
    ("fsdp2", False, 0),
    ("shared", True, 0),
    ("shared", False, 0),
    ("shared", False, 1),
    ("shared, called", False, 1),
]
# Way, microbatches of a window, and whether host and device are apart, as on a GPU.
OFFLOADED = [("float32", 1, True), ("bfloat16", 2, True), ("float32", 1, False)]


@pytest.fixture(scope="module")
def real():
    """Measure real ranks on gloo."""
    target = f"{Path(__file__).resolve()}:measure_real"
    return run_on_ranks(target, num_ranks=2)


def measure_real():
    return routed_ranks.measure_routed(ROUTED), offloaded_ranks.measure_offloaded(OFFLOADED)


@pytest.mark.parametrize("index", range(len(ROUTED)))
def test_a_rank_with_experts_peaks_as_a_real_process_with_an_even_and_the_worst_routing(
    real, index
):
    name, even, place = ROUTED[index]
    workload, sharding = routed_ranks.program(name, rank=place)
    with Sketch(workload, sharding=sharding) as sketch:
        sketch.routing.even = even
        assert sketch.step(routed_ranks.BATCH_SIZE).peak_bytes == real[place][0][index]


def test_tokens_of_two_ranks_meet_on_one_of_them(real):
    even, worst = real[0][0][2:4]
    assert worst > 1.5 * even


@pytest.mark.parametrize("index", range(len(OFFLOADED)))
def test_device_and_host_of_an_offloaded_rank_peak_as_those_of_a_real_process_do(real, index):
    way, window, is_apart = OFFLOADED[index]
    kernels = "cuda" if is_apart else "cpu"
    with Sketch(small(), kernels=kernels, sharding=Sharding(WAYS[way], 2)) as sketch:
        step = sketch.step(offloaded_ranks.BATCH_SIZE, accumulated=window > 1)
    assert [step.peak_bytes, step.host_bytes] == [*real[0][1][index]]


def test_what_is_offloaded_is_in_no_figure_of_the_device():
    with Sketch(small(), kernels="cuda", sharding=Sharding(offloaded, 2)) as sketch:
        step = sketch.step(offloaded_ranks.BATCH_SIZE)
    owners = step.timeline.owners
    for group in ("parameters", "optimizer state", "gradients"):
        assert not any(owners.get(group, [0])), group
    assert not step.trace.state
    assert not step.trace.gradients
    # Parameters, their gradients, and two moments of AdamW in float32, of half of the model each.
    num_bytes = sum(parameter.nbytes for parameter in small().build().parameters())
    assert step.host_bytes >= 4 * num_bytes // 2


@pytest.mark.long
def test_a_plan_states_what_the_host_holds():
    options = {"global_batch": 4, "device": "h100", "without": ["sac", "regions", "offload"]}
    found = plan(small(), 2**31, sharding=Sharding(offloaded, 2), **options)
    assert found.communication["host_bytes"] > 0
    assert found.communication["optimizer_seconds"] == 0
    text = " ".join(found.explain().split())
    assert "FSDP2 offloads to the host, which holds" in text
