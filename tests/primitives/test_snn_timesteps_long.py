"""Over 1,000 timesteps: bytes and FLOPs counted exactly, gradients equal to the bit.

python -m pytest tests/primitives/test_snn_timesteps_long.py
"""

import pytest

from curry_train.core.generators import untouched
from curry_train.core.measure import FlopCount, measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.gates.same_training import sample_of
from curry_train.primitives.strategies import STRATEGIES
from curry_train.workloads.models import load_workload, snn_long
from curry_train.workloads.workload import Case

CASE = Case(snn_long(), batch_size=8)


def figures(strategy):
    """Return record, FLOPs and peak of one step after the first."""
    module = CASE.build()
    batch = CASE.batch()
    loss = CASE.workload.mean_loss
    STRATEGIES[strategy].apply(module, sample_of(CASE))
    if strategy != "none":
        with untouched(module):
            loss(
                module, (batch[0][:, :40], batch[1])
            ).backward()  # the first call looks for hidden state and measures
    with FlopCount() as counted:
        record = record_step(module, batch, loss)
    return record, counted.flops, measure_memory(module, batch, loss).peak_bytes


@pytest.fixture(scope="module")
def plain():
    return figures("none")


def test_the_model_is_found_by_name():
    assert load_workload("curry_train.workloads.models:snn_long").name == "snn_long"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "levels", "less"),
    [("timesteps", 1, 19), pytest.param("timesteps_nested", 2, 30, marks=pytest.mark.long)],
)
def test_the_peak_is_a_small_share_for_at_most_one_forward_per_level(plain, strategy, levels, less):
    record, flops, peak = figures(strategy)
    assert compare(plain[0], record).bit_equal
    forward = (
        1000 * 3 * 2 * 8 * 64 * 64 + 2 * 8 * 64 * 10
    )  # timesteps, layers, multiply and add, and the head
    assert 0.9 * levels * forward < flops - plain[1] <= levels * forward
    assert plain[2] >= less * peak
    assert plain[2] < 2.5 * less * peak  # and the plain step has the expected peak
