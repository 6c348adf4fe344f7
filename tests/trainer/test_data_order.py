"""The order of samples: a permutation per epoch, computed from seed and position.

Run with `python -m pytest tests/trainer/test_data_order.py`.
"""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curry_train.data import Order


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_every_epoch_has_every_sample_once(size, seed, epoch):
    found = Order(size, seed=seed)(numpy.arange(epoch * size, (epoch + 1) * size))
    assert sorted(found) == list(range(size))


def test_a_position_has_the_same_sample_in_any_range():
    order = Order(1000, seed=3)
    positions = numpy.arange(5000)
    together = order(positions)
    alone = [int(order([position])[0]) for position in positions[::97]]
    assert alone == together[::97].tolist()


def test_order_of_a_seed_never_changes():
    """Keep the order, so that a run resumed with a later version sees the same samples."""
    assert Order(100, seed=0)(range(10)).tolist() == [37, 34, 32, 2, 27, 68, 75, 67, 39, 78]
    assert Order(100, seed=0)(range(100, 110)).tolist() == [21, 16, 5, 74, 39, 27, 95, 70, 67, 59]


def test_unshuffled_data_keeps_its_order():
    assert Order(3, shuffle=False)(range(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_empty_data_are_refused():
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        Order(0)
